"""What the trainer takes, sends back and drops."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from async_opd.cluster.trainer_actor import build_batcher
from async_opd.config.run_config import RunConfig
from async_opd.core.batch import Batch, cut, unpack
from async_opd.core.samples import Sample
from async_opd.core.stages import SCORED, STALE, topics
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_sample
from tests.timers import ManualTimer
from trainer.batcher import Batcher


class Timer:
    """Leases expire when the test says so."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __call__(self, delay: float, call: object) -> Timer:
        self.calls.append(call)
        return self

    def cancel(self) -> None: ...


def queue(timer: Timer | None = None) -> MessageQueue:
    return MessageQueue(topics(["t"]), 64, 1 << 20, 60.0, timer)  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def put(topic: MessageQueue, *samples: Sample) -> None:
    await topic.put(SCORED, Batch.pack(samples))


async def taken(batcher: Batcher, version: int = 0) -> list[str]:
    batch = await asyncio.wait_for(batcher.take(version), 5)
    await batcher.done()
    return [header.uid for header in batch.headers]


@pytest.fixture
def scored() -> MessageQueue:
    return queue()


async def test_a_batch_is_sorted_by_uid_whatever_order_it_came_in(scored: MessageQueue) -> None:
    await put(scored, *(make_sample(uid) for uid in ("c/0", "a/0", "b/0")))
    assert await taken(Batcher(scored, batch_size=3)) == ["a/0", "b/0", "c/0"]


async def test_samples_that_are_too_old_go_back_as_headers(scored: MessageQueue) -> None:
    await put(scored, make_sample("old/0", version=1), make_sample("new/0", version=3))
    await put(scored, make_sample("late/0", version=4))
    batcher = Batcher(scored, batch_size=2, max_version_lag=1)
    assert await taken(batcher, version=4) == ["late/0", "new/0"]
    lease = await scored.get(STALE, 8)
    assert [header.uid for batch in lease.batches for header in batch.headers] == ["old/0"]


async def test_a_sample_exactly_at_the_bound_is_trained(scored: MessageQueue) -> None:
    await put(scored, make_sample("a/0", version=2))
    assert await taken(Batcher(scored, batch_size=1, max_version_lag=2), version=4) == ["a/0"]


async def test_what_was_fetched_ahead_is_judged_when_it_is_taken(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=1, max_version_lag=0)
    await put(scored, make_sample("a/0", version=0))
    await put(scored, make_sample("b/0", version=0))
    assert await taken(batcher, version=0) == ["a/0"]
    await put(scored, make_sample("c/0", version=1))
    assert await taken(batcher, version=1) == ["c/0"]


async def test_every_lease_is_acknowledged_once_its_samples_are_trained(
    scored: MessageQueue,
) -> None:
    await put(scored, make_sample("a/0"), make_sample("b/0"))
    batcher = Batcher(scored, batch_size=2)
    await taken(batcher)
    stats = (await scored.stats())[SCORED]
    assert (stats.acked, stats.leased) == (2, 0)


async def test_nothing_is_acknowledged_before_the_step_is_done(scored: MessageQueue) -> None:
    await put(scored, make_sample("a/0"))
    await Batcher(scored, batch_size=1).take(0)
    assert (await scored.stats())[SCORED].acked == 0


async def test_a_group_waits_for_its_last_member(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"), make_sample("b/1"))
    assert await taken(batcher) == ["b/0", "b/1"]


async def test_members_left_over_are_trained_with_the_rest_of_their_group(
    scored: MessageQueue,
) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"), make_sample("b/1"))
    await taken(batcher)
    await put(scored, make_sample("a/1"))
    assert await taken(batcher) == ["a/0", "a/1"]


async def test_a_sample_that_comes_again_is_dropped_and_counted(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=1)
    await put(scored, make_sample("a/0"))
    await taken(batcher)
    await put(scored, make_sample("a/0"), make_sample("b/0"))
    assert await taken(batcher) == ["b/0"]
    assert batcher.duplicates == 1


async def test_as_many_trained_samples_are_remembered_as_it_says(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=1, remembered=4)
    uids = [f"{name}/0" for name in "abcdef"]
    for uid in uids:
        await put(scored, make_sample(uid))
        await taken(batcher)
    remembered = [uid for uid in uids if not await batcher.drop(uid)]
    assert remembered == ["c/0", "d/0", "e/0", "f/0"]


async def test_the_memory_of_trained_samples_follows_from_the_budget(scored: MessageQueue) -> None:
    config = RunConfig.model_validate(
        {
            "student": {"model": "s"},
            "teachers": {"t": {"model": "t"}},
            "data": {"train": "prompts.jsonl"},
            "train": {"batch_size": 4096},
            "queue": {"max_samples": 4096},
            "async": {"staleness_threshold": 2.5, "sync_steps": 8},
        }
    )
    budget = config.max_in_flight
    assert budget == 3.5 * 8 * 4096
    assert build_batcher(config, scored).remembered >= 2 * budget


async def test_a_lease_that_expired_during_the_step_trains_nothing_twice() -> None:
    timer = Timer()
    scored = queue(timer)
    batcher = Batcher(scored, batch_size=1)
    await put(scored, make_sample("a/0"))
    await batcher.take(0)
    timer.calls[0]()  # type: ignore[operator]
    await batcher.done()
    await put(scored, make_sample("b/0"))
    assert await taken(batcher) == ["b/0"]


async def test_what_is_dropped_is_let_go_and_its_lease_finished(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"), make_sample("b/1"))
    assert await taken(batcher) == ["b/0", "b/1"]
    await batcher.drop("a/1", ["a/0"])
    assert (await scored.stats())[SCORED].acked == 3


async def test_what_comes_after_it_was_dropped_is_not_held(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await batcher.drop("a/1", ["a/0"])
    await put(scored, make_sample("a/0"), make_sample("b/0"))
    await put(scored, make_sample("a/1"), make_sample("b/1"))
    assert await taken(batcher) == ["b/0", "b/1"]
    assert (batcher.duplicates, (await scored.stats())[SCORED].leased) == (0, 0)


@pytest.mark.parametrize("where", ["held", "taken", "trained"])
async def test_a_lost_copy_of_a_sample_that_is_here_ends_nothing(
    scored: MessageQueue, where: str
) -> None:
    batcher = Batcher(scored, batch_size=2)
    batcher.hold([make_sample("a/0")])
    if where != "held":
        batcher.hold([make_sample("b/0")])
        await batcher.take(0)
    if where == "trained":
        await batcher.done()
    assert not await batcher.drop("a/0")
    await put(scored, make_sample("c/0"), make_sample("d/0"))
    if where == "held":
        assert await taken(batcher) in (["a/0", "c/0"], ["a/0", "d/0"])


async def test_what_was_sent_back_for_its_age_can_be_let_go(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=1, max_version_lag=0)
    await put(scored, make_sample("a/0", version=0), make_sample("b/0", version=1))
    assert await taken(batcher, version=1) == ["b/0"]
    assert await batcher.drop("a/0")
    await put(scored, make_sample("a/0", version=1), make_sample("c/0", version=1))
    assert await taken(batcher, version=1) == ["c/0"]


async def test_a_wait_that_is_cancelled_ends_its_fetch_and_takes_no_sample(
    scored: MessageQueue,
) -> None:
    """The fetch would lease samples that nobody waits for, until the lease ends."""
    batcher = Batcher(scored, batch_size=2)
    waiting = asyncio.create_task(taken(batcher))
    await settle()
    (fetch,) = (task for task in asyncio.all_tasks() if task.get_name().startswith("fetching"))
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await settle()
    assert fetch.cancelled()
    await put(scored, make_sample("a/0"), make_sample("b/0"))
    assert await taken(Batcher(scored, batch_size=2)) == ["a/0", "b/0"]


async def test_a_batch_that_waits_goes_on_waiting_when_its_part_is_dropped(
    scored: MessageQueue,
) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"))
    waiting = asyncio.create_task(taken(batcher))
    await asyncio.sleep(0.01)
    await batcher.drop("a/1", ["a/0"])
    await put(scored, make_sample("c/0"), make_sample("b/1"))
    assert await waiting == ["b/0", "b/1"]


async def test_samples_that_a_step_holds_longer_than_a_lease_lasts_do_not_come_again() -> None:
    time = ManualTimer()
    scored = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0, time)
    batcher = Batcher(scored, batch_size=1, timer=time)
    await put(scored, make_sample("a/0"))
    await batcher.take(0)
    for _ in range(300):
        time.advance(1)
        await settle()
    await batcher.done()
    stats = (await scored.stats())[SCORED]
    assert (stats.expired, stats.acked) == (0, 1)


async def test_a_lease_that_two_settle_at_the_same_time_is_acknowledged_once() -> None:
    class Slow(MessageQueue):
        acked: list[int]

        async def ack(self, topic: str, lease_id: int) -> None:
            self.acked.append(lease_id)
            await asyncio.sleep(0)
            await super().ack(topic, lease_id)

    scored = Slow(topics(["t"]), 64, 1 << 20, 60.0)
    scored.acked = []
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"))
    waiting = asyncio.create_task(batcher.take(0))
    for uid in ("c/0", "d/0", "e/0"):  # each has a separate lease
        await asyncio.sleep(0.05)
        await put(scored, make_sample(uid))
    await asyncio.sleep(0.05)
    await asyncio.gather(
        batcher.drop("x/0", ["a/0", "b/0", "c/0", "d/0"]),
        batcher.drop("y/0", ["e/0"]),
    )
    assert len(scored.acked) == len(set(scored.acked)) == 4
    assert (await scored.stats())[SCORED].acked == 5
    waiting.cancel()


async def test_a_batch_of_large_samples_is_taken_lease_by_lease() -> None:
    one = Batch.pack([make_sample("a/0")]).nbytes
    scored = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0, lease_bytes=2 * one)
    await put(scored, *(make_sample(f"{name}/0") for name in "abcde"))
    assert await taken(Batcher(scored, batch_size=5)) == ["a/0", "b/0", "c/0", "d/0", "e/0"]
    stats = (await scored.stats())[SCORED]
    assert (stats.acked, stats.leased) == (5, 0)


async def test_a_batch_larger_than_the_whole_queue_is_taken_all_the_same() -> None:
    one = Batch.pack([make_sample("a/0")]).nbytes
    scored = MessageQueue(topics(["t"]), 64, one, 60.0, lease_bytes=one)
    taking = asyncio.create_task(taken(Batcher(scored, batch_size=4)))
    for name in "abcd":
        await asyncio.wait_for(put(scored, make_sample(f"{name}/0")), 5)
    assert await taking == ["a/0", "b/0", "c/0", "d/0"]


async def test_what_is_queued_is_read_message_by_message_and_only_what_is_wanted(
    scored: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Batch.pack([make_sample("a/0")]).nbytes
    monkeypatch.setattr("trainer.batcher.cut", partial(cut, most=2 * one))
    await put(scored, *(make_sample(f"{name}/0") for name in "abcdef"))
    await scored.get(SCORED, 2)
    wanted = {f"{name}/0" for name in "abcdf"}
    found = [
        [sample.rollout.uid for sample in part]
        async for part in Batcher(scored, batch_size=1).queued(wanted)
    ]
    assert found == [["a/0", "b/0"], ["c/0", "d/0"], ["f/0"]]


async def test_what_is_queued_is_decoded_beside_the_event_loop(
    scored: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []

    def decode(kind: type[Sample], batches: Sequence[Batch]) -> list[Sample]:
        there.append(threading.current_thread() is threading.main_thread())
        return unpack(kind, batches)

    monkeypatch.setattr("trainer.batcher.unpack", decode)
    await put(scored, make_sample("a/0"))
    parts = [part async for part in Batcher(scored, batch_size=1).queued({"a/0"})]
    assert (len(parts), there) == (1, [False])


async def test_all_of_the_next_batch_of_large_samples_is_fetched_during_a_step() -> None:
    one = Batch.pack([make_sample("a/0")]).nbytes
    scored = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0, lease_bytes=2 * one)
    await put(scored, *(make_sample(f"{name}/0") for name in "abcdefghij"))
    batcher = Batcher(scored, batch_size=5)
    await asyncio.wait_for(batcher.take(0), 5)
    assert batcher._next is not None
    await asyncio.wait_for(asyncio.shield(batcher._next), 5)  # no take waits for it yet
    assert (await scored.stats())[SCORED].leased == 10


def test_samples_of_a_checkpoint_are_held_without_encoding_them(
    scored: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> bytes:
        raise AssertionError("encoded")

    sample = make_sample("a/0", version=3)
    (header,) = Batch.pack([sample]).headers
    monkeypatch.setattr(pickle, "dumps", refused)
    batcher = Batcher(scored, batch_size=1)
    batcher.hold([sample])
    (held,) = batcher._held.values()
    assert replace(held.header, nbytes=0) == replace(header, nbytes=0)
