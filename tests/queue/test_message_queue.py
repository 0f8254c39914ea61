"""The message queue: topics by name, and leases that are acknowledged in the next call."""

from __future__ import annotations

import pickle

import pytest

from async_opd.core.batch import Batch
from async_opd.core.errors import LeaseExpired, NotLeased
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_rollout
from tests.world.clock import ManualTimer


def batch(*uids: str) -> Batch:
    return Batch.pack(make_rollout(uid) for uid in uids)


async def test_topics_do_not_mix() -> None:
    queue = MessageQueue(("a", "b"), 10, 1 << 20, 10.0)
    await queue.put("a", batch("x/0"))
    assert (await queue.stats())["b"].ready == 0


async def test_a_get_can_acknowledge_the_lease_before() -> None:
    queue = MessageQueue(("a",), 10, 1 << 20, 10.0)
    await queue.put("a", batch("x/0"))
    await queue.put("a", batch("y/0"))
    first = await queue.get("a", 1)
    await queue.get("a", 1, ack=first.id)
    assert (await queue.stats())["a"].acked == 1


async def test_a_late_acknowledgement_is_an_error_with_a_remedy() -> None:
    timer = ManualTimer()
    queue = MessageQueue(("a",), 10, 1 << 20, 10.0, timer)
    await queue.put("a", batch("x/0"))
    lease = await queue.get("a", 1)
    timer.advance(11)
    with pytest.raises(LeaseExpired, match=r"queue\.lease_s"):
        await queue.ack("a", lease.id)


async def test_leases_of_a_kept_topic_do_not_expire() -> None:
    timer = ManualTimer()
    messages = MessageQueue(("t",), 10, 1 << 20, 10.0, timer, kept=("t",))
    await messages.put("t", batch("a"))
    await messages.get("t", 1)
    assert timer.due == []


async def test_several_leases_are_acknowledged_in_one_call() -> None:
    messages = MessageQueue(("t",), 10, 1 << 20, 10.0, ManualTimer())
    await messages.put("t", batch("a", "b", "c"))
    leases = [(await messages.get("t", 1)).id for _ in range(2)]
    await messages.get("t", 1, ack=tuple(leases))
    assert (await messages.stats())["t"].acked == 2


async def test_a_lease_of_a_queue_that_died_is_settled_already() -> None:
    old = MessageQueue(("t",), 10, 1 << 20, 10.0)
    await old.put("t", batch("a"))
    lease = await old.get("t", 1)
    new = MessageQueue(("t",), 10, 1 << 20, 10.0)
    await new.put("t", batch("a"))
    await new.get("t", 1)
    await new.ack("t", lease.id)
    assert (await new.stats())["t"].leased == 1


async def test_beside_an_expired_lease_the_others_are_acknowledged() -> None:
    timer = ManualTimer()
    messages = MessageQueue(("t",), 10, 1 << 20, 10.0, timer)
    await messages.put("t", batch("a", "b"))
    first = await messages.get("t", 1)
    timer.advance(11)
    second = await messages.get("t", 1)
    third = await messages.get("t", 1)
    with pytest.raises(LeaseExpired):
        await messages.get("t", 1, ack=(first.id, second.id, third.id))
    assert (await messages.stats())["t"].acked == 2


async def test_leases_of_several_topics_are_renewed_in_one_call() -> None:
    timer = ManualTimer()
    messages = MessageQueue(("a", "b"), 10, 1 << 20, 10.0, timer)
    leases = {}
    for name in ("a", "b"):
        await messages.put(name, batch("x"))
        leases[name] = [(await messages.get(name, 1)).id]
    timer.advance(9)
    assert await messages.renew(leases) == 10.0
    timer.advance(9)
    stats = await messages.stats()
    assert [stats[name].leased for name in ("a", "b")] == [1, 1]


async def test_an_expired_lease_is_news_with_its_topic() -> None:
    timer = ManualTimer()
    messages = MessageQueue(("t",), 10, 1 << 20, 10.0, timer)
    await messages.put("t", batch("a"))
    await messages.get("t", 1, consumer="x")
    timer.advance(11)
    (line,) = (await messages.events(0)).lines
    assert line.startswith("topic t: 1 samples went back: x took them")


async def test_one_fetch_has_the_samples_of_several_leases() -> None:
    messages = MessageQueue(("t",), 10, 1 << 20, 10.0, ManualTimer())
    await messages.put("t", batch("a", "b", "c"))
    first, second = [await messages.get("t", most, payloads=False) for most in (1, 2)]
    found = await messages.fetch("t", {first.id: ["a"], second.id: ["c"]})
    assert [header.uid for header in found.headers] == ["a", "c"]


@pytest.mark.parametrize("end", ["expired", "acknowledged", "of a queue that died", "of others"])
async def test_what_is_not_leased_cannot_be_fetched(end: str) -> None:
    timer = ManualTimer()
    messages = MessageQueue(("t",), 10, 1 << 20, 10.0, timer)
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
