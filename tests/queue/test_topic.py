"""A topic: order, bounds, leases, and that nothing is lost whatever the interleaving."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.batch import MESSAGE_BYTES, Batch
from async_opd.core.errors import QueueClosed
from async_opd.core.stages import Lease
from async_opd.queue.topic import LeaseTable, Topic
from tests.conftest import make_rollout
from tests.properties import examples
from tests.world.clock import ManualTimer, settle


def topic(
    max_samples: int = 100,
    max_bytes: int = 1 << 20,
    timer: Any = None,
    lease_bytes: int = MESSAGE_BYTES,
) -> Topic:
    return Topic(max_samples, max_bytes, 10.0, timer or ManualTimer(), lease_bytes=lease_bytes)


def batch(*uids: str) -> Batch:
    return Batch.pack(make_rollout(uid) for uid in uids)


ONE = batch("a/0").nbytes
"""Bytes of one of these rollouts."""


def uids(lease: Any) -> list[str]:
    return [header.uid for b in lease.batches for header in b.headers]


async def test_a_get_takes_no_more_than_it_asked_for_in_order_and_splits_a_batch_for_it() -> None:
    queue = topic()
    await queue.put(Batch.pack([]))
    await queue.put(batch("a/0", "b/0", "c/0"))
    await queue.put(batch("d/0"))
    assert queue.stats.put == 4
    assert uids(await queue.get(2)) == ["a/0", "b/0"]
    lease = await queue.get(9)
    assert [item.uid for b in lease.batches for item in b.unpack()] == ["c/0", "d/0"]


@pytest.mark.parametrize(
    ("at_least", "lease_bytes", "payloads", "came"),
    [(3, MESSAGE_BYTES, True, 3), (5, 2 * ONE, True, 2), (2, 1, False, 2)],
    ids=["all", "what a lease may carry", "headers, whatever a lease may carry"],
)
async def test_a_get_waits_until_at_least_so_many_are_there(
    at_least: int, lease_bytes: int, payloads: bool, came: int
) -> None:
    queue = topic(lease_bytes=lease_bytes)
    waiting = asyncio.create_task(queue.get(at_least, at_least, payloads=payloads))
    for uid in ("a/0", "b/0", "c/0")[: came - 1]:
        await queue.put(batch(uid))
    await settle(5)
    assert not waiting.done()
    await queue.put(batch("z/0"))
    assert len(uids(await waiting)) == came
    with pytest.raises(ValueError, match="cannot wait for 5"):  # it could never be served
        await topic(max_samples=4).get(5, 5)


@pytest.mark.parametrize("payloads", [True, False])
@pytest.mark.parametrize("bound", [{"max_samples": 1}, {"max_bytes": ONE}])
async def test_a_put_waits_while_the_topic_is_full_and_goes_on_after_an_ack(
    bound: dict[str, int], payloads: bool
) -> None:
    queue = topic(**bound)
    await queue.put(batch("a/0"))
    waiting = asyncio.create_task(queue.put(batch("b/0")))
    lease = await queue.get(1, payloads=payloads)
    await settle(5)
    assert not waiting.done()
    queue.ack(lease.id)
    await waiting


async def test_a_consumer_that_waits_for_more_than_the_byte_bound_holds_is_still_served() -> None:
    queue = topic(max_bytes=1)
    waiting = asyncio.create_task(queue.get(3, 3))
    for uid in ("a/0", "b/0", "c/0"):
        await asyncio.wait_for(queue.put(batch(uid)), 5)
    assert len(await waiting) == 3


async def test_a_lease_expires_a_full_time_after_it_was_renewed_last_and_comes_back_first() -> None:
    timer, messages = ManualTimer(), list[str]()
    queue = Topic(100, 1 << 20, 10.0, timer, messages.append)
    await queue.put(batch("a/0", "b/0", "c/0"))
    lease = await queue.get(2, consumer="scorer#1")
    for _ in range(5):
        timer.advance(9)
        queue.renew([lease.id])
    timer.advance(9)
    assert queue.stats.expired == 0
    timer.advance(1)
    assert queue.stats.expired == 2
    (line,) = messages
    assert line.startswith("2 samples went back: scorer#1 took them")
    assert "did not renew their lease for 10 s" in line
    assert "raise queue.lease_s" in line
    queue.renew([lease.id])
    assert (queue.ack(lease.id), queue.stats.ready, queue.stats.leased) == (False, 3, 0)
    again = await queue.get(1)
    assert queue.nack(again.id)
    acked = await queue.get(3)
    assert uids(acked) == ["a/0", "b/0", "c/0"]
    queue.ack(acked.id)
    timer.advance(100)
    assert queue.stats.ready == 0


async def test_a_cancelled_get_leaves_its_samples_for_the_next_one() -> None:
    queue = topic()
    waiting = asyncio.create_task(queue.get(1))
    await settle()
    putting = asyncio.create_task(queue.put(batch("a/0")))
    waiting.cancel()
    await putting
    assert uids(await queue.get(1)) == ["a/0"]


async def test_a_get_cancelled_after_it_was_served_gives_its_lease_back() -> None:
    queue = topic()
    waiting = asyncio.create_task(queue.get(1))
    await settle()
    await queue.put(batch("a/0"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert uids(await asyncio.wait_for(queue.get(1), 5)) == ["a/0"]


async def test_what_is_given_back_goes_to_the_consumer_that_waits() -> None:
    queue = topic()
    await queue.put(batch("a/0"))
    lease = await queue.get(1)
    waiting = asyncio.create_task(queue.get(1))
    await settle()
    queue.nack(lease.id)
    assert uids(await asyncio.wait_for(waiting, 5)) == ["a/0"]


async def test_a_closed_topic_takes_and_gives_nothing() -> None:
    queue = topic()
    await queue.put(batch("a/0"))
    queue.close()
    with pytest.raises(QueueClosed):
        await queue.get(1)
    with pytest.raises(QueueClosed):
        await queue.put(batch("b/0"))


async def test_closing_wakes_every_waiter_with_an_error() -> None:
    queue = topic(max_samples=1)
    getting = asyncio.create_task(queue.get(1))
    await settle()
    queue.close()
    with pytest.raises(QueueClosed):
        await getting


@examples(60)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    asks=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(["ack", "nack", "expire", "renew"])),
        max_size=40,
    ),
    max_samples=st.integers(1, 8),
)
def test_every_sample_is_acknowledged_exactly_once_whatever_consumers_do(
    sizes: list[int], asks: list[tuple[int, str]], max_samples: int
) -> None:
    names = [[f"{i}-{j}/0" for j in range(size)] for i, size in enumerate(sizes)]

    async def run() -> list[str]:
        timer = ManualTimer()
        queue = topic(max_samples=max_samples, timer=timer)
        producing = asyncio.create_task(produce(queue))
        done: list[str] = []
        plan = iter(asks)
        while len(done) < sum(sizes):
            at_most, what = next(plan, (6, "ack"))
            lease = await asyncio.wait_for(queue.get(at_most), 5)
            if what == "ack":
                assert queue.ack(lease.id)
                done += uids(lease)
            elif what == "renew":
                for _ in range(3):
                    timer.advance(9)
                    queue.renew([lease.id])
                assert queue.ack(lease.id)
                done += uids(lease)
            elif what == "nack":
                queue.nack(lease.id)
            else:
                timer.advance(11)
        await producing
        assert queue.stats.ready == queue.stats.leased == queue.stats.nbytes == 0
        return done

    async def produce(queue: Topic) -> None:
        for group in names:
            await queue.put(batch(*group))

    assert asyncio.run(run()) == [uid for group in names for uid in group]


async def test_a_shared_get_takes_an_even_part_of_what_is_there() -> None:
    shared = topic()
    takers = [asyncio.create_task(shared.get(10, share=True)) for _ in range(3)]
    await settle()
    await shared.put(batch(*"abcdefg"))
    assert [len(await taker) for taker in takers] == [3, 2, 2]


async def test_releasing_a_consumer_gives_back_its_leases_and_no_others() -> None:
    given = topic()
    await given.put(batch("a", "b", "c", "d"))
    for consumer in "xxy":
        await given.get(1, consumer=consumer)
    assert (given.release("x"), given.stats.leased) == (2, 1)
    assert uids(await given.get(3)) == ["a", "b", "d"]
    with pytest.raises(QueueClosed, match="was released as dead"):
        await given.get(1, consumer="x")


async def test_a_released_consumer_that_still_waits_takes_nothing_along() -> None:
    given = topic()
    waiting = asyncio.create_task(given.get(1, consumer="x"))
    await settle()
    given.release("x")
    await given.put(batch("a"))
    assert uids(await given.get(1, consumer="y")) == ["a"]
    with pytest.raises(QueueClosed, match="was released as dead"):
        await waiting


async def test_a_lease_ends_before_its_bytes_or_tokens_are_too_many() -> None:
    queue = topic(lease_bytes=2 * ONE)
    await queue.put(batch("a/0", "b/0", "c/0"))
    await queue.put(batch("d/0", "e/0", "f/0", "g/0"))
    assert uids(await queue.get(10)) == ["a/0", "b/0"]
    assert uids(await queue.get(10)) == ["c/0", "d/0"]
    tokens = batch("a/0").tokens
    assert uids(await queue.get(10, tokens=2 * tokens)) == ["e/0", "f/0"]
    assert uids(await queue.get(10, tokens=tokens - 1)) == ["g/0"]
    large = topic(lease_bytes=ONE - 1)
    await large.put(batch("a/0", "b/0"))
    assert uids(await large.get(10)) == ["a/0"]  # alone


async def test_the_contents_of_some_samples_are_theirs_leased_or_ready() -> None:
    queue = topic()
    await queue.put(batch("a/0", "b/0"))
    await queue.put(batch("c/0", "d/0", "e/0"))
    await queue.get(1)
    assert [header.uid for header in queue.headers] == ["a/0", "b/0", "c/0", "d/0", "e/0"]
    found = [item.uid for part in queue.contents({"a/0", "c/0", "e/0"}) for item in part.unpack()]
    assert found == ["a/0", "c/0", "e/0"]


async def test_a_lease_of_headers_has_them_all_whatever_their_bytes_and_no_payload() -> None:
    one = batch("a/0").nbytes
    queue = topic(lease_bytes=2 * one)
    await queue.put(batch("a/0", "b/0", "c/0"))
    lease = await queue.get(3, 3, payloads=False)
    assert uids(lease) == ["a/0", "b/0", "c/0"]
    assert [header.nbytes for b in lease.batches for header in b.headers] == [one] * 3
    assert (lease.nbytes, queue.stats.nbytes) == (0, 3 * one)


async def test_payloads_are_fetched_under_their_lease_and_stay_there() -> None:
    queue = topic()
    await queue.put(batch("a/0", "b/0", "c/0"))
    lease = await queue.get(3, payloads=False)
    found = queue.fetch(lease.id, ["c/0", "a/0"])
    assert [item.uid for item in found.unpack()] == ["a/0", "c/0"]
    assert len(queue.fetch(lease.id, ["a/0"])) == 1
    queue.ack(lease.id)
    assert (len(queue.fetch(lease.id, ["a/0"])), queue.stats.nbytes) == (0, 0)


@examples(100)
@given(
    batches=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), min_size=1, max_size=8),
    lease_items=st.integers(1, 6),
    tokens=st.none() | st.integers(1, 40),
    ends=st.lists(st.sampled_from(["ack", "nack"]), max_size=20),
    at_least=st.integers(1, 4),
)
def test_every_lease_is_one_sample_or_within_all_its_bounds_and_loses_none(
    batches: list[list[int]], lease_items: int, tokens: int | None, ends: list[str], at_least: int
) -> None:
    made = [
        Batch.pack(make_rollout(f"{i}-{j}/0", tokens=size) for j, size in enumerate(sizes))
        for i, sizes in enumerate(batches)
    ]
    names = [header.uid for b in made for header in b.headers]
    lease_bytes = lease_items * ONE

    async def run() -> list[str]:
        queue = topic(lease_bytes=lease_bytes)
        for one in made:
            await queue.put(one)
        done: list[str] = []
        plan = iter(ends)
        while len(done) < len(names):
            least = min(at_least, len(names) - len(done))
            lease = await asyncio.wait_for(queue.get(4, least, tokens=tokens), 5)
            assert len(lease) == 1 or (
                lease.nbytes <= lease_bytes and (tokens is None or lease.tokens <= tokens)
            )
            if next(plan, "ack") == "ack":
                queue.ack(lease.id)
                done += uids(lease)
            else:
                queue.nack(lease.id)
        stats = queue.stats
        assert (stats.ready, stats.leased, stats.nbytes, queue._ready_bytes) == (0, 0, 0, 0)
        return done

    assert asyncio.run(run()) == names


def batches(*uids: str) -> tuple[Batch, ...]:
    return (Batch.pack(make_rollout(uid) for uid in uids),)


def test_a_loan_that_is_taken_back_is_counted_no_longer_and_does_not_expire() -> None:
    timer, late = ManualTimer(), list[Lease]()
    loans = LeaseTable(10, timer, lambda entry: late.append(entry.lease))
    lease = loans.grant(batches("a", "b"), "x")
    assert (len(loans), loans.of("x")) == (2, [lease])
    assert loans.remove(lease.id) == lease
    assert (len(loans), loans.of("x"), loans.remove(lease.id)) == (0, [], None)
    second = loans.grant(batches("c"), "x")
    timer.advance(11)
    assert (late, len(loans)) == ([second], 1)


def test_numbers_of_an_earlier_life_are_known_as_such_though_the_clock_is_behind_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time_ns", iter(range(10**9, 0, -1)).__next__)
    old = LeaseTable(10, ManualTimer(), lambda entry: None).grant(batches("a"), "x")
    new = LeaseTable(10, ManualTimer(), lambda entry: None)
    assert new.predates_restart(old.id)
    assert not new.predates_restart(new.grant(batches("a"), "x").id)
