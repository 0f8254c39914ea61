"""Payloads by reference: read from their nodes, kept while the queue has them, lost with a node."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.cluster.payloads import storing
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import NotLeased, StageError
from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import SCORED, Lease, rollouts_topic, topics
from async_opd.core.uid import Uid
from async_opd.queue.message_queue import MessageQueue
from async_opd.queue.payloads import COLLECT_S, read
from teachers.answers import check
from tests.conftest import make_rollout
from tests.properties import examples
from tests.world.clock import ManualTimer, settle
from tests.world.payloads import EXPIRY_S, Node, Nodes, Teacher, put_scored, storing_teacher

ROLLOUTS = rollouts_topic("t")
LEASE_S = EXPIRY_S


def queue(world: Nodes | None = None, timer: ManualTimer | None = None) -> MessageQueue:
    return MessageQueue(
        topics(["t"]), 64, 1 << 20, LEASE_S, timer or ManualTimer(), stores=world or Nodes()
    )


def rollouts(*uids: str) -> Batch:
    return Batch.pack(make_rollout(uid) for uid in uids)


def uids(batches: tuple[Batch, ...]) -> list[str]:
    return [header.uid for batch in batches for header in batch.headers]


async def test_a_stored_sample_is_read_as_it_would_have_come_by_value() -> None:
    made = queue()
    await put_scored(made, "p/0", "q/0")
    by_value = await Teacher().score(rollouts("p/0", "q/0"))
    lease = await made.get(SCORED, 2)
    found = await read(made, SCORED, lease.batches)
    assert [row for batch in found for row in batch.rows] == list(by_value.rows)
    np.testing.assert_array_equal(np.concatenate([b.buffer for b in found]), by_value.buffer)


async def test_samples_by_value_are_read_without_a_copy() -> None:
    by_value = (await Teacher().score(rollouts("p/0")),)
    assert await read(queue(), SCORED, by_value) == by_value


async def test_only_large_samples_are_stored() -> None:
    made, world = queue(world := Nodes()), world
    small, large = make_rollout("p/0", tokens=2), make_rollout("q/0", tokens=500)
    teacher = await storing_teacher(made, "a", least=3000)
    batch = await teacher.score(Batch.pack([small, large]))
    assert ([one is not None for one in batch.stored], len(world.nodes["a"].copies)) == (
        [False, True],
        1,
    )
    await made.put(SCORED, batch)
    found = await read(made, SCORED, (await made.get(SCORED, 2)).batches)
    assert [len(one.scores.logprobs) for one in unpack(Sample, found)] == [2, 500]  # type: ignore[union-attr]


async def test_small_samples_are_stored_if_together_they_exceed_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = queue(world := Nodes())
    teacher = await storing_teacher(made, "a", least=1 << 20)
    small = await teacher.score(rollouts("p/0", "q/0"))
    monkeypatch.setattr(storing, "MESSAGE_BYTES", small.nbytes)
    await teacher.score(rollouts("p/0", "q/0"))
    assert not world.nodes["a"].copies
    batch = await teacher.score(rollouts("p/0", "q/0", "r/0"))
    assert (len(batch.numbers[world.nodes["a"]]), len(world.nodes["a"].copies)) == (3, 3)


async def test_unsound_scores_are_refused_where_they_were_made_and_the_scorer_compares_uids() -> (
    None
):
    class Broken(Teacher):
        async def score(self, batch: Batch) -> Batch:
            made = unpack(Rollout, [batch])
            return Batch.pack(
                Sample(one, SampledLogprobs(np.ones_like(one.rollout_logprobs))) for one in made
            )

    made, nodes = queue(nodes := Nodes()), nodes
    with pytest.raises(StageError, match="has 1, which is above 0"):
        await (await storing_teacher(made, "a", Broken())).score(rollouts("p/0"))
    assert not nodes.nodes["a"].copies
    stored = await put_scored(made, "p/0")
    check("teacher t", rollouts("p/0"), stored)
    with pytest.raises(StageError, match="1 other samples"):
        check("teacher t", rollouts("q/0"), stored)


async def test_a_topic_counts_stored_bytes_and_the_batch_carries_few() -> None:
    made = queue()
    teacher = await storing_teacher(made, "a")
    by_value = await Teacher().score(rollouts("p/0"))
    batch = await teacher.score(rollouts("p/0"))
    await made.put(SCORED, batch)
    assert (await made.stats())[SCORED].nbytes == by_value.nbytes + batch.buffer.nbytes
    assert batch.buffer.nbytes == rollouts("p/0").nbytes


async def test_a_payload_goes_when_its_sample_is_acknowledged() -> None:
    made, world = queue(world := Nodes(), timer := ManualTimer()), world
    await put_scored(made, "p/0", "q/0")
    lease = await made.get(SCORED, 2)
    await timer.passes(COLLECT_S)
    assert len(world.nodes["a"].copies) == 2
    await made.ack(SCORED, lease.id)
    await timer.passes(COLLECT_S)
    assert len(world.nodes["a"].copies) == 0


async def test_a_payload_that_never_reaches_the_queue_goes_after_a_while() -> None:
    timer = ManualTimer()
    made, world = queue(world := Nodes(timer.clock), timer), world
    teacher = await storing_teacher(made, "a")
    await teacher.score(rollouts("lost/0"))  # the scorer died with this answer
    await put_scored(made, "p/0")
    await timer.passes(COLLECT_S)
    await timer.passes(EXPIRY_S + 1)
    await put_scored(made, "q/0")
    assert len(world.nodes["a"].copies) == 2
    found = await read(made, SCORED, (await made.get(SCORED, 2)).batches)
    assert uids(found) == ["p/0", "q/0"]


async def test_samples_of_a_lost_node_are_scored_again_and_the_others_of_their_lease_are_back() -> (
    None
):
    made, world = queue(world := Nodes(), timer := ManualTimer()), world
    await put_scored(made, "p/0", "q/0", node="a")
    await put_scored(made, "r/0", node="b")
    lease = await made.get(SCORED, 3)
    world.nodes["a"].lost = True
    with pytest.raises(NotLeased) as error:
        await read(made, SCORED, lease.batches)
    assert error.value.uids == ("p/0", "q/0")
    again = await made.get(ROLLOUTS, 9)
    assert [one.uid for one in unpack(Rollout, again.batches)] == ["p/0", "q/0"]
    assert Batch.join(again.batches).rows == rollouts("p/0", "q/0").rows
    left = await made.get(SCORED, 9)
    assert uids(await read(made, SCORED, left.batches)) == ["r/0"]
    await timer.passes(COLLECT_S)
    events = await made.events(0, wait=False)
    assert "topic scored: 2 samples are scored again" in str(events)


async def test_lost_samples_of_several_leases_are_one_line_of_the_log() -> None:
    made, world = queue(world := Nodes(), timer := ManualTimer()), world
    await put_scored(made, "p/0", "q/0", "r/0")
    leases = [await made.get(SCORED, 1) for _ in range(3)]
    world.nodes["a"].lost = True

    async def lose(*gone: Lease) -> tuple[str, ...]:
        for lease in gone:
            with pytest.raises(NotLeased):
                await read(made, SCORED, lease.batches)
        await timer.passes(COLLECT_S)
        return (await made.events(0, wait=False)).lines

    (line,) = await lose(*leases[:2])
    assert line.startswith("topic scored: 2 samples are scored again: their scores could not be")
    await lose(leases[0])  # another rank has the same lease
    assert "topic scored: 1 samples" in (await lose(leases[2]))[-1]


async def test_what_two_readers_find_lost_is_scored_again_once() -> None:
    made, world = queue(world := Nodes()), world
    await put_scored(made, "p/0")
    lease = await made.get(SCORED, 1)
    world.nodes["a"].lost = True
    for _ in range(2):
        with pytest.raises(NotLeased):
            await read(made, SCORED, lease.batches)
    stats = await made.stats()
    assert (stats[ROLLOUTS].put, stats[SCORED].ready, stats[SCORED].nbytes) == (1, 0, 0)


async def test_a_teacher_whose_store_died_asks_for_another_one() -> None:
    made, world = queue(world := Nodes()), world
    teacher = await storing_teacher(made, "a")
    world.nodes["a"].lost = True
    await made.put(SCORED, await teacher.score(rollouts("p/0")))
    assert uids(await read(made, SCORED, (await made.get(SCORED, 1)).batches)) == ["p/0"]


async def test_a_put_that_is_cancelled_keeps_no_payload() -> None:
    timer, world = ManualTimer(), Nodes()
    made = MessageQueue(topics(["t"]), 1, 1 << 20, LEASE_S, timer, stores=world)
    await put_scored(made, "p/0")
    waiting = asyncio.create_task(put_scored(made, "q/0"))
    await timer.passes(COLLECT_S)
    assert len(world.nodes["a"].copies) == 2
    waiting.cancel()
    await settle()
    await timer.passes(COLLECT_S)
    assert len(world.nodes["a"].copies) == 1


async def test_a_put_that_is_cancelled_after_its_batch_came_in_keeps_its_payloads() -> None:
    timer, world = ManualTimer(), Nodes()
    made = MessageQueue(topics(["t"]), 1, 1 << 20, LEASE_S, timer, stores=world)
    await put_scored(made, "p/0")
    waiting = asyncio.create_task(put_scored(made, "q/0"))
    await settle()
    await made.ack(SCORED, (await made.get(SCORED, 1)).id)
    waiting.cancel()
    await settle()
    await timer.passes(COLLECT_S)
    assert waiting.cancelled()
    found = await read(made, SCORED, (await made.get(SCORED, 1)).batches)
    assert uids(found) == ["q/0"]


async def test_a_queue_that_is_closed_ends_its_stores_and_one_without_them_says_so() -> None:
    made, world = queue(world := Nodes()), world
    await made.close()
    assert world.closed
    with pytest.raises(StageError, match="no stores of payloads"):
        await MessageQueue(("t",), 1, 1, 1.0).payload_store("a")


async def test_bytes_on_a_nodes_disk_are_counted_and_each_node_is_named_once() -> None:
    made, world = queue(world := Nodes()), world
    assert (await made.stats())[SCORED].spilled == 0
    world.on_disk = {"a": 3 << 20, "b": 0}
    stats = [(await made.stats())[SCORED].spilled for _ in range(2)]
    events = str(await made.events(0, wait=False))
    assert (stats, events.count("memory of node a: 3 MiB")) == ([3 << 20] * 2, 1)
    assert "node b" not in events
    by_value = MessageQueue(topics(["t"]), 64, 1 << 20, LEASE_S)
    assert (await by_value.stats())[SCORED].spilled is None


STEPS = st.sampled_from(["score", "orphan", "take", "read", "train", "expire", "die a", "die b"])


@examples(150)
@given(st.lists(st.tuples(STEPS, st.integers(1, 3)), max_size=40))
def test_each_payload_lives_as_long_as_its_sample_and_what_is_lost_is_scored_again_once(
    steps: list[tuple[str, int]],
) -> None:
    asyncio.run(_Life().run(steps))


class _Life:
    """A queue with 12 rollouts; what is scored, taken, trained and lost."""

    UIDS = tuple(Uid(f"p{index}/0") for index in range(12))

    def __init__(self) -> None:
        self.timer = ManualTimer()
        self.world = Nodes(self.timer.clock)
        self.queue = queue(self.world, self.timer)
        self.teacher = Teacher()
        self.expected = Counter(self.UIDS)
        """How often each rollout is to be scored."""
        self.orphans: Counter[str] = Counter()
        self.taken: list[Lease] = []
        self.trained: Counter[str] = Counter()

    async def run(self, steps: list[tuple[str, int]]) -> None:
        await self.queue.put(ROLLOUTS, rollouts(*self.UIDS))
        for step, count in steps:
            name, _, node = step.partition(" ")
            await getattr(self, name)(*([node] if node else [count]))
            await self.check()
        await self.expire(1)
        while len(self.trained) < len(self.UIDS):
            await self.score(3)
            await self.take(3)
            await self.train(9)
        await self.check()
        assert self.trained == Counter(self.UIDS)
        assert self.teacher.scored == self.expected
        await self.timer.passes(COLLECT_S)
        await self.timer.passes(EXPIRY_S + 1)
        for left in self.world.nodes.values():
            if not left.lost:
                await left.put([])
                assert not left.copies

    async def check(self) -> None:
        """Every payload in the queue is there, unless its node is lost, and no other one is.

        But for those of a scorer that died, which nobody knows of.
        """
        await self.timer.passes(COLLECT_S)
        held: Counter[Node] = Counter()
        for batch in await self.queue.contents(SCORED, self.UIDS):
            for store, numbers in batch.numbers.items():
                assert isinstance(store, Node)
                held[store] += len(numbers)
                assert all((one is None) is store.lost for one in await store.fetch(numbers))
        for name, node in self.world.nodes.items():
            if not node.lost:
                assert held[node] <= len(node.copies) <= held[node] + self.orphans[name]

    async def score(self, count: int) -> None:
        stats = (await self.queue.stats())[ROLLOUTS]
        if not stats.ready:
            return
        lease = await self.queue.get(ROLLOUTS, count)
        replica = await storing_teacher(self.queue, "ab"[count % 2], self.teacher)
        await self.queue.put(SCORED, await replica.score(Batch.join(lease.batches)))
        await self.queue.ack(ROLLOUTS, lease.id)

    async def orphan(self, count: int) -> None:
        """A scorer that dies with an answer: its rollouts go back."""
        replica = await storing_teacher(self.queue, node := "ab"[count % 2])
        await replica.score(rollouts("orphan/0"))
        self.orphans[node] += 1

    async def take(self, count: int) -> None:
        if (await self.queue.stats())[SCORED].ready:
            self.taken.append(await self.queue.get(SCORED, count))

    async def read(self, count: int) -> list[Lease]:
        """Those of the oldest leases that have all of their payloads."""
        found = []
        for lease in self.taken[:count]:
            try:
                batches = await read(self.queue, SCORED, lease.batches)
            except NotLeased:
                self.taken.remove(lease)
            else:
                assert [one.rollout.uid for one in unpack(Sample, batches)] == uids(lease.batches)
                found.append(lease)
        return found

    async def train(self, count: int) -> None:
        for lease in await self.read(count):
            self.trained.update(uids(lease.batches))
            await self.queue.ack(SCORED, lease.id)
            self.taken.remove(lease)

    async def expire(self, count: int) -> None:
        self.timer.advance(LEASE_S + 1)
        self.taken.clear()

    async def die(self, node: str) -> None:
        lost = self.world.nodes.get(node)
        if lost is None or lost.lost:
            return
        lost.lost = True
        for batch in await self.queue.contents(SCORED, self.UIDS):
            gone = batch.numbers.get(lost, [])
            places = zip(batch.rows, batch.stored, strict=True)
            self.expected.update(row[0] for row, one in places if one and one.number in gone)
