"""The message queue: topics by name, and leases that are acknowledged in the next call."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from async_opd.core.batch import Batch
from async_opd.core.errors import LeaseExpired, NotLeased
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_rollout
from tests.world.clock import ManualTimer


async def test_a_lease_of_a_queue_that_died_is_settled_already() -> None:
    old = made()
    await old.put("t", batch("a"))
    lease = await old.get("t", 1)
    new = made()
    await new.put("t", batch("a"))
    await new.get("t", 1)
    await new.ack("t", lease.id)
    assert (await new.stats())["t"].leased == 1


def made(timer: ManualTimer | None = None, **options: Any) -> MessageQueue:
    return MessageQueue(("t", "u"), 10, 1 << 20, 10.0, timer or ManualTimer(), **options)


def batch(*uids: str) -> Batch:
    return Batch.pack(make_rollout(uid) for uid in uids)


async def test_beside_an_expired_lease_which_is_news_the_others_are_acknowledged() -> None:
    timer = ManualTimer()
    messages = made(timer)
    await messages.put("t", batch("a", "b"))
    first = await messages.get("t", 1, consumer="x")
    timer.advance(11)
    (line,) = (await messages.events(0)).lines
    assert line.startswith("topic t: 1 samples went back: x took them")
    second = await messages.get("t", 1)
    third = await messages.get("t", 1)
    with pytest.raises(LeaseExpired, match=r"queue\.lease_s"):
        await messages.get("t", 1, ack=(first.id, second.id, third.id))
    stats = await messages.stats()
    assert (stats["t"].acked, stats["u"].put) == (2, 0)


async def test_leases_of_a_kept_topic_do_not_expire() -> None:
    timer = ManualTimer()
    messages = made(timer, kept=("t",))
    await messages.put("t", batch("a"))
    await messages.get("t", 1)
    assert timer.due == []


async def test_leases_of_several_topics_are_renewed_in_one_call() -> None:
    timer = ManualTimer()
    messages = made(timer)
    leases = {}
    for name in ("t", "u"):
        await messages.put(name, batch("x"))
        leases[name] = [(await messages.get(name, 1)).id]
    timer.advance(9)
    assert await messages.renew(leases) == 10.0
    timer.advance(9)
    stats = await messages.stats()
    assert [stats[name].leased for name in ("t", "u")] == [1, 1]


async def test_one_fetch_has_the_samples_of_several_leases() -> None:
    messages = made()
    await messages.put("t", batch("a", "b", "c"))
    first, second = [await messages.get("t", most, payloads=False) for most in (1, 2)]
    found = await messages.fetch("t", {first.id: ["a"], second.id: ["c"]})
    assert [header.uid for header in found.headers] == ["a", "c"]


@pytest.mark.parametrize("end", ["expired", "acknowledged", "of a queue that died", "of others"])
async def test_what_is_not_leased_cannot_be_fetched(end: str) -> None:
    timer = ManualTimer()
    messages = made(timer)
    await messages.put("t", batch("a", "b"))
    lease_id = (await messages.get("t", 1, payloads=False)).id
    if end == "expired":
        timer.advance(11)
    elif end == "acknowledged":
        await messages.ack("t", lease_id)
    elif end == "of a queue that died":
        lease_id = 1
    with pytest.raises(NotLeased, match=r"(?s)cannot be fetched.*lease them again") as caught:
        await messages.fetch("t", {lease_id: ["b" if end == "of others" else "a"]})
    assert pickle.loads(pickle.dumps(caught.value)).uids == caught.value.uids


async def test_headers_alone_cannot_be_decoded() -> None:
    with pytest.raises(ValueError, match="without payloads"):
        batch("a").without_payloads.unpack()
