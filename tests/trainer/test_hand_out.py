"""Each rank fetches what it trains, nothing is lost or trained twice, whoever dies when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.cluster.trainer_actor import RemoteRankGroup
from async_opd.core.batch import Batch
from async_opd.core.errors import ProcessDied, QueueClosed, StageError
from async_opd.core.samples import Header, Sample
from async_opd.core.stages import SCORED, STALE, Lease, topics
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_sample
from tests.properties import examples
from tests.trainer.models import bare_stage
from tests.world.clock import ManualTimer, settle
from tests.world.payloads import Nodes, put_scored, score_again
from trainer.batcher import Batcher
from trainer.batches.micro_batches import PlannedMicroBatch
from trainer.batches.packing import Vocabularies
from trainer.batches.shares import AssignedBatch, HandOut, Plan, fetch
from trainer.batches.token_weights import TokenWeight
from trainer.follower import Follower
from trainer.learner import LearnerReport
from trainer.rank_group import run_with_ranks

LEASE_S = 60.0


class Planner:
    """Deals samples out in turn, one micro-batch a rank; masked ones weigh nothing."""

    vocabularies, sight = Vocabularies(99), None

    def __init__(self, ranks: int, masked: Sequence[str] = ()) -> None:
        self.ranks, self.masked = ranks, masked

    def plan(self, headers: Sequence[Header]) -> Plan:
        counted = [i for i, header in enumerate(headers) if header.uid not in self.masked]
        groups = [tuple(counted[rank :: self.ranks]) for rank in range(self.ranks)]
        made = [(PlannedMicroBatch(g, (TokenWeight(),) * len(g)),) for g in groups]
        return Plan(tuple(headers), tuple(made), tuple(counted))


class Client:
    """One process's way to a queue: it counts the payloads that come back, and may be slow."""

    def __init__(
        self, queue: Callable[[], MessageQueue], pace: Iterator[int] | None = None
    ) -> None:
        self.queue, self.pace = queue, pace or cycle([0])
        self.received: list[str] = []
        self.before_fetch: list[Callable[[], Any]] = []
        """Each is called and awaited before one call of ``fetch``."""

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            for _ in range(next(self.pace)):
                await asyncio.sleep(0)
            if name == "fetch" and self.before_fetch:
                await self.before_fetch.pop()()
            answer = await getattr(self.queue(), name)(*args, **named)
            batches = answer.batches if isinstance(answer, Lease) else answer
            for batch in batches if isinstance(batches, tuple) else (batches,):
                if isinstance(batch, Batch) and batch.nbytes:
                    self.received += [header.uid for header in batch.headers]
            return answer

        return call


class Ranks:
    """A rank group whose other ranks are real followers in this process."""

    def __init__(self, clients: Sequence[Any], vocabularies: Vocabularies) -> None:
        rank: Any = SimpleNamespace(student=SimpleNamespace(vocabularies=vocabularies, sight=None))
        self.followers = [Follower(rank, client) for client in clients]
        self.ranks = len(clients) + 1
        self.loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[StageError] = self.loop.create_future()

    def dispatch(self, method: str, arguments: Sequence[Any]) -> Callable[[], list[Any]]:
        calls = [
            asyncio.run_coroutine_threadsafe(getattr(follower, method)(*given), self.loop)
            for follower, given in zip(self.followers, arguments, strict=True)
        ]
        return lambda: [call.result(5) for call in calls]

    def mark_broken(self) -> None: ...

    async def failure(self) -> StageError:
        return await asyncio.shield(self.broken)


WORLDS: list[World] = []


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """Every world ends with its test."""
    yield
    while WORLDS:
        WORLDS.pop().close()


class World:
    """A queue, a trainer of several ranks, and what each process received."""

    def __init__(
        self,
        ranks: int = 2,
        batch_size: int = 4,
        planner: Planner | None = None,
        pace: Iterator[int] | None = None,
        **settings: Any,
    ) -> None:
        self.timer = ManualTimer()
        self.queue = self.new_queue()
        self.planner = planner or Planner(ranks)
        self.clients = [Client(lambda: self.queue, pace) for _ in range(ranks)]
        self.batch_size, self.settings = batch_size, settings
        WORLDS.append(self)
        self.trainer()

    def new_queue(self) -> MessageQueue:
        return MessageQueue(topics(["t"]), 64, 1 << 20, LEASE_S, self.timer)

    def trainer(self) -> None:
        """A trainer that has nothing yet; its leases are never renewed."""
        first: Any = self.clients[0]
        self.batcher = Batcher(
            first, batch_size=self.batch_size, timer=ManualTimer(), payloads=False, **self.settings
        )
        self.ranks = Ranks(self.clients[1:], self.planner.vocabularies)
        self.hand_out = HandOut(self.batcher, self.planner, self.ranks)

    def close(self) -> None:
        self.hand_out.close()
        self.batcher.close()

    async def put(self, *uids: str, version: int = 0, tokens: int = 4) -> None:
        samples = [make_sample(uid, tokens, version) for uid in uids]
        await self.queue.put(SCORED, Batch.pack(samples))

    async def take(self, version: int = 0) -> AssignedBatch:
        return await asyncio.wait_for(self.hand_out.take(version), 5)

    async def fetched(self, count: int) -> None:
        """Waits until so many payloads have been received, whether or not a step needs them."""
        async with asyncio.timeout(5):
            while sum(len(client.received) for client in self.clients) < count:
                await settle()


def uids(dealt: AssignedBatch) -> list[str]:
    return [header.uid for header in dealt.batch.headers]


def names(count: int) -> list[str]:
    return [f"{index:02d}/0" for index in range(count)]


async def test_no_rank_receives_the_samples_of_another_one() -> None:
    world = World(ranks=3, batch_size=6)
    await world.put(*names(6))
    dealt = await world.take()
    await world.batcher.done()
    assert uids(dealt) == names(6)
    assert [client.received for client in world.clients] == [
        ["00/0", "03/0"],
        ["01/0", "04/0"],
        ["02/0", "05/0"],
    ]
    stats = (await world.queue.stats())[SCORED]
    assert (stats.acked, stats.leased, stats.nbytes) == (6, 0, 0)


async def test_the_next_batch_is_fetched_while_a_step_is_computed() -> None:
    world = World()
    await world.put(*names(8))
    first = await world.take()
    await world.fetched(8)
    assert sorted(uid for client in world.clients for uid in client.received) == names(8)
    assert uids(first) == names(4)
    assert (await world.queue.stats())[SCORED].acked == 0


async def test_samples_that_weigh_nothing_are_measured_by_one_rank_each() -> None:
    loop = [7] * 40
    world = World(planner=Planner(2, masked=("00/0", "02/0", "03/0")))
    samples = [make_sample(uid, len(loop)) for uid in names(4)]
    for sample in samples:
        sample.rollout.continuation[:] = loop
    await world.queue.put(SCORED, Batch.pack(samples))
    dealt = await world.take()
    assert sorted(uid for client in world.clients for uid in client.received) == names(4)
    assert dealt.repetition == pytest.approx(4 * 32 / 33)


async def test_a_copy_that_comes_while_its_sample_is_trained_is_not_trained() -> None:
    world = World(batch_size=2)
    await world.put(*names(2))
    await world.take()
    await world.put(*names(3))
    await world.put("03/0")
    await world.fetched(4)
    await world.batcher.done()
    assert uids(await world.take()) == ["02/0", "03/0"]
    assert world.batcher.duplicates == 2


async def test_of_two_headers_of_a_sample_the_newer_one_is_fetched() -> None:
    """The older one's lease has expired: its sample is what comes again."""
    world = World(batch_size=2, group_size=2)
    await world.put("a/0", "b/0")
    taking = asyncio.create_task(world.take())
    await settle()
    world.timer.advance(LEASE_S + 1)
    await world.put("b/1")
    assert uids(await taking) == ["b/0", "b/1"]
    await world.batcher.done()
    stats = (await world.queue.stats())[SCORED]
    assert (stats.acked, stats.ready, stats.leased) == (1, 0, 2)  # b/0 has a lease with a/0


async def test_a_batch_that_has_become_too_old_while_it_was_dealt_out_is_not_trained() -> None:
    world = World(batch_size=1, max_version_lag=0)
    await world.put("00/0", version=0)
    await world.put("01/0", version=0)
    await world.take(0)
    await world.fetched(2)
    await world.batcher.done()
    await world.put("02/0", version=1)
    assert uids(await world.take(1)) == ["02/0"]
    stale = await world.queue.get(STALE, 8)
    assert [header.uid for batch in stale.batches for header in batch.headers] == ["01/0"]


async def test_a_sample_too_old_for_a_version_synced_while_dealing_waits_is_not_fetched() -> None:
    world = World(batch_size=1, max_version_lag=0)
    await world.put("00/0", version=0)
    await world.take(0)
    await settle()  # the next batch is awaited: the queue is empty
    await world.batcher.done()
    taking = asyncio.create_task(world.take(1))
    await settle()
    await world.put("01/0", version=0)
    await world.put("02/0", version=1)
    assert uids(await taking) == ["02/0"]
    assert "01/0" not in {uid for client in world.clients for uid in client.received}


async def test_a_sample_that_is_dropped_while_it_was_dealt_out_is_not_trained() -> None:
    world = World(batch_size=1)
    await world.put("00/0")
    await world.put("01/0")
    await world.take()
    await world.fetched(2)
    assert await world.batcher.drop("01/0")
    await world.batcher.done()
    await world.put("02/0")
    assert uids(await world.take()) == ["02/0"]


async def test_samples_that_cannot_go_back_into_the_queue_end_the_step() -> None:
    world = World(batch_size=2)
    await world.queue.close()
    world.batcher.hold([make_sample("00/0")])
    await settle()
    with pytest.raises(QueueClosed):
        await world.take()


async def test_samples_that_turn_out_to_be_lost_are_not_waited_for() -> None:
    world = World(batch_size=2)
    refused = asyncio.Event()

    async def put(topic: str, batch: Batch) -> None:
        await refused.wait()
        raise StageError("queue", "it takes no sample")

    world.queue.put = put
    world.batcher.hold([make_sample("00/0")])
    taking = asyncio.create_task(world.take())
    await settle()
    refused.set()
    with pytest.raises(StageError, match="takes no sample"):
        await taking


async def test_a_second_capture_ends_the_copy_of_the_first() -> None:
    world = World(batch_size=2)
    await world.put(*names(2))
    await world.take()
    world.queue.contents = lambda *_: asyncio.Event().wait()
    first = world.batcher.copy_held()
    await settle()
    second = world.batcher.copy_held()
    await settle()
    assert (first.cancelled(), second.done()) == (True, False)


async def test_what_a_lost_node_had_is_scored_again_and_everything_is_dealt_out_once() -> None:
    world, nodes = World(batch_size=4), Nodes()
    world.queue = MessageQueue(topics(["t"]), 64, 1 << 20, LEASE_S, world.timer, stores=nodes)
    await put_scored(world.queue, *names(4)[:2], node="a")
    await put_scored(world.queue, *names(4)[2:], node="b")
    nodes.nodes["a"].lost = True
    taking = asyncio.create_task(world.take())
    again = [await asyncio.wait_for(score_again(world.queue, "b"), 5) for _ in range(2)]
    assert again == [["00/0"], ["01/0"]]  # each is another rank's
    assert uids(await taking) == names(4)
    await world.batcher.done()
    stats = (await world.queue.stats())[SCORED]
    assert (stats.ready, stats.leased, stats.nbytes, stats.put) == (0, 0, 0, 6)


async def test_a_rank_refuses_tokens_that_its_head_has_no_row_for() -> None:
    world = World()
    await world.put(*names(4))
    batch = await world.batcher.choose(lambda: 0)
    share = world.planner.plan(batch.headers).shares(batch.leases, 2, 1)[1]
    found = await fetch(world.batcher.queue, share, Vocabularies(2))
    assert "has token 2; the head has 2 rows" in str(found.error)


async def test_an_error_of_fetching_the_next_batch_ends_no_step_under_way() -> None:
    class Process:
        """The process of a follower, without Ray."""

        name = "trainer/1"

        def __init__(self, follower: Follower) -> None:
            self.follower = follower

        async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
            return await getattr(self.follower, method)(*arguments)

    async def fails() -> None:
        raise ProcessDied("queue", "its process died")

    world = World(batch_size=2)
    followers: Any = [Process(world.ranks.followers[0])]
    rank_group = RemoteRankGroup(followers, grace_s=0)
    world.hand_out = HandOut(world.batcher, world.planner, rank_group)
    await world.put(*names(4))
    world.clients[1].before_fetch += [fails, settle]
    await world.take()
    while world.clients[1].before_fetch:
        await settle()
    step = asyncio.sleep(0, "trained")
    assert await run_with_ranks(rank_group, step, grace_s=0) == "trained"
    with pytest.raises(ProcessDied) as caught:
        await world.take()
    assert caught.value.stage == "queue"


async def test_a_rank_that_dies_ends_what_is_dealt_out() -> None:
    world = World()
    await world.put(*names(4))

    async def dies() -> None:
        world.ranks.broken.set_result(StageError("trainer", "its process died"))
        await asyncio.Event().wait()

    world.clients[0].before_fetch.append(dies)
    with pytest.raises(StageError, match="its process died"):
        await world.take()


async def test_a_stage_of_several_ranks_trains_what_each_has_fetched() -> None:
    seen: list[Any] = []

    class Learner(Planner):
        def train(self, plan: Plan, own: Any, repeated: float, number: int) -> LearnerReport:
            seen.append(([s.rollout.uid for one in own for s in one.samples], repeated, number))
            return LearnerReport({"loss/total": 1.0})

    world = World()
    await world.put(*names(4))
    stage = bare_stage(Learner(2), world.batcher, max_version_lag=1, rank_group=world.ranks)
    report = await asyncio.wait_for(stage.step(), 5)
    assert seen == [(["00/0", "02/0"], 0.0, 1)]
    assert [header.uid for header in report.trained] == names(4)
    assert (await world.queue.stats())[SCORED].acked == 4


class Run:
    """Steps of a trainer, and checkpoints from which it goes on after a rank has died."""

    def __init__(self, samples: int, pace: Iterator[int]) -> None:
        self.world = World(batch_size=2, pace=pace)
        self.names = names(samples)
        self.trained: Counter[str] = Counter()
        self.checkpoint: tuple[Mapping[str, int], tuple[Sample, ...]] = ({}, ())
        self.stepping = asyncio.create_task(self.steps())

    async def steps(self) -> None:
        while True:
            dealt = await self.world.hand_out.take(0)
            await asyncio.sleep(0)  # the step
            self.trained.update(uids(dealt))
            await self.world.batcher.done()

    async def issue(self, besides: Sequence[str] = ()) -> None:
        left = [name for name in self.names if not self.trained[name] and name not in besides]
        for name in left:
            await self.world.put(name)

    async def act(self, event: str) -> None:
        if event == "expire":
            self.world.timer.advance(LEASE_S + 1)
        elif event == "the queue dies":
            self.world.queue = self.world.new_queue()
            await self.issue()
        elif event == "checkpoint":
            before = dict(self.trained)
            held = await self.world.batcher.copy_held()
            self.checkpoint = before, tuple(s for s in held if s.rollout.uid not in before)
        else:
            await self.restart()

    async def restart(self) -> None:
        """A rank died: trainer and queue are built anew, and the checkpoint is read."""
        self.stepping.cancel()
        await asyncio.wait((self.stepping,))
        self.world.close()
        self.world.queue = self.world.new_queue()
        trained, held = self.checkpoint
        self.trained = Counter(trained)
        self.world.trainer()
        self.world.batcher.hold(held)
        await self.issue([sample.rollout.uid for sample in held])
        self.stepping = asyncio.create_task(self.steps())


@examples(40)
@given(
    events=st.lists(
        st.sampled_from(["expire", "the queue dies", "checkpoint", "a rank dies"]), max_size=5
    ),
    gaps=st.lists(st.integers(0, 30), min_size=5, max_size=5),
    pace=st.lists(st.integers(0, 5), min_size=1, max_size=10),
)
def test_whatever_expires_or_dies_when_every_sample_is_trained_once(
    events: list[str], gaps: list[int], pace: list[int]
) -> None:
    async def run() -> None:
        made = Run(8, cycle(pace))
        await made.issue()
        for event, gap in zip(events, gaps, strict=False):
            for _ in range(gap):
                await asyncio.sleep(0.0001)
            await made.act(event)
        async with asyncio.timeout(10):
            while len(made.trained) < 8 or (await made.world.queue.stats())[SCORED].leased:
                if made.stepping.done():
                    made.stepping.result()
                made.world.timer.advance(LEASE_S / 3)
                await asyncio.sleep(0.001)
        made.stepping.cancel()
        made.world.close()
        assert made.trained == Counter(made.names)

    asyncio.run(run())
