"""The message queue: topics by name, leases, and images, which it holds once."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.batch import Batch
from async_opd.core.errors import LeaseExpired, NotLeased, StageError, StageTimeout
from async_opd.core.row import Media
from async_opd.media.cache import MediaCache
from async_opd.queue.message_queue import HeldMedia, MessageQueue
from tests.conftest import make_rollout
from tests.properties import examples
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


def sha(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()


A, B = b"a", b"bb"


def holding(**owners: bytes) -> HeldMedia:
    held = HeldMedia()
    owned = {owner: [sha(encoded)] for owner, encoded in owners.items()}
    held.keep(owned, complete=True, encoded={sha(one): one for one in owners.values()})
    return held


def test_what_is_not_held_is_asked_for_and_once_it_is_held_no_more() -> None:
    held = HeldMedia()
    assert held.keep({"p": [sha(A), sha(B), sha(A)]}) == (sha(A), sha(B))
    assert held.keep({"p": [sha(A), sha(B)]}, encoded={sha(A): A}) == (sha(B),)
    assert held.keep({"q": [sha(A)]}) == ()


async def test_an_image_counts_once_and_is_gone_with_the_last_of_its_owners() -> None:
    held = holding(p=A, q=A, r=B)
    assert (held.stats.images, held.stats.nbytes, held.stats.added_bytes) == (2, 3, 3)
    held.drop(["p"])
    assert await held.get([sha(A)]) == {sha(A): A}
    held.drop(["q", "r", "unknown"])
    held.keep({}, encoded={sha(A): A})  # bytes that nobody keeps
    assert await held.get([sha(A)]) == {}
    assert (held.stats.images, held.stats.nbytes) == (0, 0)


def test_bytes_of_another_image_are_refused() -> None:
    with pytest.raises(StageError, match=f"2 bytes came as image {sha(A)}, which they are not"):
        HeldMedia().keep({"p": [sha(A)]}, encoded={sha(A): B})


@pytest.mark.parametrize("known", [True, False], ids=["kept", "before all in flight are known"])
async def test_an_image_that_is_still_to_come_is_waited_for(known: bool) -> None:
    held = HeldMedia()
    if known:
        held.keep({"p": [sha(A)]}, complete=True)
    getting = asyncio.create_task(held.get([sha(A)]))
    await asyncio.sleep(0)
    assert not getting.done()
    held.keep({} if known else {"q": [sha(B)]}, complete=True, encoded={sha(A): A} if known else {})
    assert await getting == ({sha(A): A} if known else {})


async def test_an_image_that_is_kept_is_waited_for_however_long_the_others_take_before_it() -> None:
    """A queue that was restarted gets all images again, one message after the other."""
    timer, others = ManualTimer(), [bytes([number]) for number in range(5)]
    queue = MessageQueue((), 1, 1, 1.0, timer)
    cache = MediaCache(queue.media, 0)
    await queue.keep_media({"p": [sha(A), *map(sha, others)]}, complete=True)
    getting = asyncio.create_task(cache.get([Media(sha(A), 1, 1, 1)]))
    for other in others:
        await asyncio.sleep(0)
        timer.advance(11)
        await queue.keep_media({}, encoded={sha(other): other})
    await queue.keep_media({}, encoded={sha(A): A})
    assert await getting == [A]


async def test_a_kept_image_that_does_not_come_is_no_fault_of_its_prompt() -> None:
    queue = MessageQueue((), 1, 1, 1.0)
    await queue.keep_media({"p": [sha(A)]}, complete=True)
    cache = MediaCache(queue.media, 0, timeout_s=0.01)
    with pytest.raises(StageTimeout, match=f"the first is {sha(A)}"):
        await cache.get([Media(sha(A), 1, 1, 1)])


async def test_an_image_that_is_dropped_before_it_comes_is_waited_for_no_longer() -> None:
    held = HeldMedia()
    held.keep({"p": [sha(A)], "q": [sha(B)]}, complete=True, encoded={sha(B): B})
    getting = asyncio.create_task(held.get([sha(A), sha(B)]))
    await asyncio.sleep(0)
    held.drop(["p"])
    assert await asyncio.wait_for(getting, 5) == {sha(B): B}


owners = st.sampled_from("pqrs")
actions = st.lists(st.tuples(owners, st.none() | st.sets(st.integers(0, 4))), max_size=30)


@given(actions)
@examples(100)
def test_held_is_what_somebody_keeps(done: list[tuple[str, set[int] | None]]) -> None:
    encoded = [bytes([number]) * (number + 1) for number in range(5)]
    held, model = HeldMedia(), dict[str, set[int]]()
    for owner, numbers in done:
        if numbers is None:
            held.drop([owner])
            model.pop(owner, None)
        else:
            lacking = held.keep({owner: [sha(encoded[one]) for one in numbers]})
            known = set().union(*model.values())
            assert set(lacking) == {sha(encoded[one]) for one in numbers - known}
            held.keep({}, encoded={sha(encoded[one]): encoded[one] for one in numbers})
            model.setdefault(owner, set()).update(numbers)
        kept = set().union(*model.values())
        assert (held.stats.images, held.stats.nbytes) == (len(kept), sum(one + 1 for one in kept))
