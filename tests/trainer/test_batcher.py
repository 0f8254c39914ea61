"""What the trainer takes, sends back and drops."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from async_opd.cluster.trainer_actor import build_batcher
from async_opd.core.batch import Batch, cut, unpack
from async_opd.core.samples import Sample
from async_opd.core.stages import DEAD, SCORED, STALE, topics
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_sample
from tests.world.clock import ManualTimer, settle
from tests.world.config import run_config
from tests.world.payloads import Nodes, put_scored, score_again
from trainer.batcher import Batcher

LEASE_S = 60.0


def queue(timer: ManualTimer | None = None, nbytes: int = 1 << 20, **more: Any) -> MessageQueue:
    return MessageQueue(topics(["t"]), 64, nbytes, LEASE_S, timer, **more)


def named(uids: str, version: int = 0) -> list[Sample]:
    """Samples a/0, b/0, … of the letters."""
    return [make_sample(f"{one}/0", version=version) for one in uids]


ONE = Batch.pack(named("a")).nbytes


async def leased(queue: MessageQueue, count: int) -> None:
    """Waits until so many scored samples are leased, and the batcher has them."""
    async with asyncio.timeout(5):
        while (await queue.stats())[SCORED].leased < count:
            await settle()
    await settle()


async def put(topic: MessageQueue, *samples: Sample) -> None:
    await topic.put(SCORED, Batch.pack(samples))


async def taken(batcher: Batcher, version: int = 0) -> list[str]:
    batch = await asyncio.wait_for(batcher.take(version), 5)
    await batcher.done()
    return [header.uid for header in batch.headers]


@pytest.fixture
def scored() -> MessageQueue:
    return queue()


async def test_a_batch_is_sorted_and_acknowledged_after_its_step(scored: MessageQueue) -> None:
    await put(scored, *named("cab"))
    batcher, acked = Batcher(scored, batch_size=3), []
    batch = await batcher.take(0)
    acked.append((await scored.stats())[SCORED].acked)
    await batcher.done()
    stats = (await scored.stats())[SCORED]
    assert [header.uid for header in batch.headers] == ["a/0", "b/0", "c/0"]
    assert ([*acked, stats.acked], stats.leased) == ([0, 3], 0)


async def test_samples_that_are_too_old_go_back_as_headers(scored: MessageQueue) -> None:
    """One exactly at the bound is trained."""
    await put(scored, make_sample("old/0", version=1), make_sample("new/0", version=3))
    await put(scored, make_sample("late/0", version=4))
    batcher = Batcher(scored, batch_size=2, max_version_lag=1)
    assert await taken(batcher, version=4) == ["late/0", "new/0"]
    lease = await scored.get(STALE, 8)
    assert [header.uid for batch in lease.batches for header in batch.headers] == ["old/0"]


async def test_what_was_fetched_ahead_is_judged_when_it_is_taken(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=1, max_version_lag=0)
    await put(scored, make_sample("a/0", version=0))
    await put(scored, make_sample("b/0", version=0))
    assert await taken(batcher, version=0) == ["a/0"]
    await put(scored, make_sample("c/0", version=1))
    assert await taken(batcher, version=1) == ["c/0"]


async def test_members_wait_for_the_last_one_of_their_group(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"), make_sample("b/1"))
    assert await taken(batcher) == ["b/0", "b/1"]
    await put(scored, make_sample("a/1"))
    assert await taken(batcher) == ["a/0", "a/1"]


async def test_a_sample_that_comes_again_is_dropped_and_counted(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=1)
    await put(scored, *named("a"))
    await taken(batcher)
    await put(scored, *named("ab"))
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
    pace: Any = {"async": {"staleness_threshold": 2.5, "sync_steps": 8}}
    config = run_config(train={"batch_size": 4096}, queue={"max_samples": 4096}, **pace)
    budget = config.max_in_flight
    assert budget == 3.5 * 8 * 4096
    assert build_batcher(config, scored).remembered >= 2 * budget


async def test_a_mask_sends_no_sample_back_for_its_age(scored: MessageQueue) -> None:
    more: Any = {"async": {"max_version_lag": 0, "on_stale": "mask"}, "rollout": {"n": 1}}
    batcher = build_batcher(run_config(train={"batch_size": 2}, **more), scored)
    await put(scored, *named("ab"))
    batch = await batcher.take(9)
    assert ([header.uid for header in batch.headers], batch.requeued) == (["a/0", "b/0"], 0)


async def test_what_is_dropped_is_let_go_and_its_lease_finished(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"), make_sample("b/1"))
    assert await taken(batcher) == ["b/0", "b/1"]
    await batcher.drop("a/1", ["a/0"])
    assert (await scored.stats())[SCORED].acked == 3


async def test_what_is_given_up_is_a_dead_letter_and_its_lease_finished(
    scored: MessageQueue,
) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, make_sample("a/0"), make_sample("b/0"), make_sample("b/1"))
    assert await taken(batcher) == ["b/0", "b/1"]
    await batcher.give_up({"a/0": "too long"})
    stats = await scored.stats()
    assert (stats[SCORED].acked, stats[DEAD].ready) == (3, 1)


async def test_what_comes_after_it_was_dropped_is_not_held(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await batcher.drop("a/1", ["a/0"])
    await put(scored, *named("ab"))
    await put(scored, make_sample("a/1"), make_sample("b/1"))
    assert await taken(batcher) == ["b/0", "b/1"]
    assert (batcher.duplicates, (await scored.stats())[SCORED].leased) == (0, 0)


@pytest.mark.parametrize("where", ["held", "taken", "trained"])
async def test_a_lost_copy_of_a_held_sample_ends_nothing(scored: MessageQueue, where: str) -> None:
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


async def test_a_cancelled_wait_ends_its_fetch_and_takes_no_sample(scored: MessageQueue) -> None:
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
    await put(scored, *named("ab"))
    assert await taken(Batcher(scored, batch_size=2)) == ["a/0", "b/0"]


async def test_a_batch_waits_on_when_its_part_is_dropped(scored: MessageQueue) -> None:
    batcher = Batcher(scored, batch_size=2, group_size=2)
    await put(scored, *named("ab"))
    waiting = asyncio.create_task(taken(batcher))
    await leased(scored, 2)
    await batcher.drop("a/1", ["a/0"])
    await put(scored, make_sample("c/0"), make_sample("b/1"))
    assert await waiting == ["b/0", "b/1"]


async def test_samples_that_a_step_holds_longer_than_a_lease_lasts_do_not_come_again() -> None:
    time = ManualTimer()
    scored = queue(time)
    batcher = Batcher(scored, batch_size=1, timer=time)
    await put(scored, *named("a"))
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
    await put(scored, *named("ab"))
    waiting = asyncio.create_task(batcher.take(0))
    for number, uid in enumerate(("c/0", "d/0", "e/0")):  # each has its own lease
        await leased(scored, 2 + number)
        await put(scored, make_sample(uid))
    await leased(scored, 5)
    async with asyncio.timeout(60):
        while len(await batcher.copy_held()) < 5:  # a thread decodes them
            await settle()
    await asyncio.gather(
        batcher.drop("x/0", ["a/0", "b/0", "c/0", "d/0"]), batcher.drop("y/0", ["e/0"])
    )
    assert len(scored.acked) == len(set(scored.acked)) == 4
    assert (await scored.stats())[SCORED].acked == 5
    waiting.cancel()


async def test_batches_of_large_samples_are_taken_lease_by_lease_the_next_during_a_step() -> None:
    scored = queue(lease_bytes=2 * ONE)
    await put(scored, *named("abcdefghij"))
    batcher = Batcher(scored, batch_size=5)
    first = await asyncio.wait_for(batcher.take(0), 5)
    await leased(scored, 10)  # no take waits for the next batch yet
    assert [header.uid for header in first.headers] == [f"{one}/0" for one in "abcde"]
    await batcher.done()
    assert (await scored.stats())[SCORED].acked == 5


async def test_a_batch_larger_than_the_whole_queue_is_taken_all_the_same() -> None:
    scored = queue(nbytes=ONE, lease_bytes=ONE)
    taking = asyncio.create_task(taken(Batcher(scored, batch_size=4)))
    for one in named("abcd"):
        await asyncio.wait_for(put(scored, one), 5)
    assert await taking == ["a/0", "b/0", "c/0", "d/0"]


async def test_what_is_queued_is_read_message_by_message_and_only_what_is_wanted(
    scored: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.batcher.cut", partial(cut, most=2 * ONE))
    await put(scored, *named("abcdef"))
    await scored.get(SCORED, 2)
    wanted = {f"{name}/0" for name in "abcdf"}
    found = [
        [sample.rollout.uid for sample in part]
        async for part in Batcher(scored, batch_size=1).queued(wanted)
    ]
    assert found == [["a/0", "b/0"], ["c/0", "d/0"], ["f/0"]]


async def test_decoding_is_in_a_thread(
    scored: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []

    def decode(kind: type[Sample], batches: Sequence[Batch]) -> list[Sample]:
        there.append(threading.current_thread() is threading.main_thread())
        return unpack(kind, batches)

    monkeypatch.setattr("trainer.batcher.unpack", decode)
    await put(scored, *named("a"))
    parts = [part async for part in Batcher(scored, batch_size=1).queued({"a/0"})]
    assert (len(parts), there) == (1, [False])


async def test_samples_of_a_checkpoint_are_held_without_encoding_them(
    scored: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sample,) = named("a", version=3)
    (header,) = Batch.pack([sample]).headers
    monkeypatch.setattr(pickle, "dumps", Mock(side_effect=AssertionError("encoded")))
    batcher = Batcher(scored, batch_size=1)
    batcher.hold([sample])
    (held,) = (await batcher.take(3)).headers
    assert replace(held, nbytes=0) == replace(header, nbytes=0)


async def test_what_a_lost_node_had_is_scored_again_before_a_batch_is_complete() -> None:
    scored = queue(stores=(nodes := Nodes()))
    await put_scored(scored, "a/0", "b/0", node="x")
    await put_scored(scored, "c/0", node="y")
    nodes.nodes["x"].lost = True
    batcher = Batcher(scored, batch_size=3)
    taking = asyncio.create_task(taken(batcher))
    assert await score_again(scored, "y") == ["a/0", "b/0"]
    assert await taking == ["a/0", "b/0", "c/0"]
    assert (await scored.stats())[SCORED].nbytes == 0


async def test_a_lease_whose_samples_a_lost_node_had_is_renewed_no_longer() -> None:
    scored = queue(timer := ManualTimer(), stores=(nodes := Nodes()))
    renewed: list[tuple[int, ...]] = []
    renew = scored.renew

    async def watched(leases: Mapping[str, Sequence[int]]) -> float:
        renewed.append(tuple(leases.get(SCORED, ())))
        return await renew(leases)

    scored.renew = watched  # type: ignore[method-assign]
    await put_scored(scored, "a/0", node="x")
    nodes.nodes["x"].lost = True
    batcher = Batcher(scored, batch_size=1, timer=timer)
    taking = asyncio.create_task(batcher.take(0))
    await score_again(scored, "y")
    batch = await asyncio.wait_for(taking, 5)
    await timer.passes(LEASE_S / 3)
    assert renewed[-1] == batch.leases
    batcher.close()


async def test_a_checkpoint_has_stored_samples_and_leaves_out_what_a_lost_node_had() -> None:
    scored = queue(stores=(nodes := Nodes()))
    await put_scored(scored, "a/0", node="x")
    await put_scored(scored, "b/0", node="y")
    nodes.nodes["x"].lost = True
    queued = Batcher(scored, batch_size=1).queued({"a/0", "b/0"})
    assert [one.rollout.uid async for part in queued for one in part] == ["b/0"]
    assert await score_again(scored, "y") == ["a/0"]
