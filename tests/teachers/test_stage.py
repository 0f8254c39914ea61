"""The scoring stage between the queue's topics, on fakes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import NoReplica, StageError
from async_opd.core.samples import DeadLetter, Sample
from async_opd.core.stages import DEAD, SCORED, rollouts_topic, topics
from async_opd.queue.message_queue import MessageQueue
from async_opd.waiting.deadline import Timer
from teachers import offload as aside
from teachers import replica_slots as slots
from teachers.stage import ScorerStage
from tests.conftest import make_rollout
from tests.teachers.test_pool import SAMPLING, Clock, Fake, FakeRebuild, settle
from tests.timers import ManualTimer

TOPIC = rollouts_topic("t")


def rollouts(*uids: str) -> Batch:
    return Batch.pack(make_rollout(uid) for uid in uids)


@asynccontextmanager
async def stage(
    *replicas: Fake,
    clock: Clock | None = None,
    rebuild: FakeRebuild | None = None,
    timer: Timer | None = None,
) -> AsyncIterator[tuple[MessageQueue, asyncio.Task[None]]]:
    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0, clock)
    scorer = ScorerStage({"t": replicas}, queue, {"t": 8}, rebuild=rebuild, timer=timer)
    running = asyncio.create_task(scorer.run())
    try:
        yield queue, running
    finally:
        await scorer.shutdown()
        await asyncio.wait({running})


async def test_rollouts_become_samples() -> None:
    async with stage(Fake()) as (queue, _):
        await queue.put(TOPIC, rollouts("p/0", "p/1"))
        lease = await asyncio.wait_for(queue.get(SCORED, 2, 2), 5)
        assert [s.rollout.uid for s in unpack(Sample, lease.batches)] == ["p/0", "p/1"]


async def test_what_cannot_be_scored_is_dead_lettered_and_the_rest_is_not() -> None:
    async with stage(Fake(poison=frozenset({"p/1"}))) as (queue, _):
        await queue.put(TOPIC, rollouts("p/0", "p/1"))
        dead = await asyncio.wait_for(queue.get(DEAD, 9), 5)
        scored = await asyncio.wait_for(queue.get(SCORED, 9), 5)
        assert [lost.header.uid for lost in unpack(DeadLetter, dead.batches)] == ["p/1"]
        assert [s.rollout.uid for s in unpack(Sample, scored.batches)] == ["p/0"]


async def test_a_lease_that_expired_meanwhile_is_scored_again_and_stops_nothing() -> None:
    clock, gate = Clock(), asyncio.Event()

    class Slow(Fake):
        async def score(self, batch: Batch) -> Batch:
            await gate.wait()
            return await super().score(batch)

    async with stage(Slow(), clock=clock) as (queue, running):
        await queue.put(TOPIC, rollouts("p/0"))
        await settle()
        await clock.pass_(60)
        gate.set()
        lease = await asyncio.wait_for(queue.get(SCORED, 2, 2), 5)
        await settle()
        uids = [sample.rollout.uid for sample in unpack(Sample, lease.batches)]
        assert (uids, running.done()) == (["p/0", "p/0"], False)


class Sleepy(Fake):
    """Shares its GPU."""

    awake = True

    def kill(self) -> None:
        self.awake = False

    async def sleep(self) -> None:
        self.awake = False

    async def wake(self) -> None:
        self.awake = True


class Gated(Fake):
    """Scores when the gate is open."""

    def __init__(self, gate: asyncio.Event) -> None:
        super().__init__()
        self.gate = gate

    async def score(self, batch: Batch) -> Batch:
        await self.gate.wait()
        return await super().score(batch)


async def test_rollouts_that_take_longer_to_score_than_a_lease_lasts_are_scored_once() -> None:
    time, gate = ManualTimer(), asyncio.Event()
    fake = Gated(gate)
    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0, time)
    scorer = ScorerStage({"t": [fake]}, queue, {"t": 8}, timer=time)
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, rollouts("p/0"))
    for _ in range(300):
        await settle()
        time.advance(1)
    gate.set()
    await asyncio.wait_for(queue.get(SCORED, 1), 5)
    await settle()
    assert fake.scored == [("p/0",)]
    assert (await queue.stats())[TOPIC].acked == 1
    await scorer.shutdown()
    await asyncio.wait({running})


async def test_rollouts_that_wait_for_their_teachers_turn_are_held_once_however_long() -> None:
    time = ManualTimer()
    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0, time)
    scorer = ScorerStage(
        {"t": [Sleepy()]}, queue, {"t": 8}, hosts={"t": "rollout"}, backlog_size=64, timer=time
    )
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, rollouts(*(f"p/{index}" for index in range(8))))
    for _ in range(300):
        await settle()
        time.advance(1)
    stats = (await queue.stats())[TOPIC]
    assert (stats.leased, stats.expired, stats.ready) == (8, 0, 0)
    assert scorer._backlogs["rollout"].held == {"t": 8}
    await scorer.shutdown()
    await asyncio.wait({running})


class Never(FakeRebuild):
    """Rebuilds for ever."""

    async def __call__(self, teacher: str, index: int, old: object) -> Fake:
        return await asyncio.get_running_loop().create_future()


async def test_what_becomes_of_a_replica_is_news_before_anything_is_scored() -> None:
    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)
    scorer = ScorerStage({"t": [Fake(dead=True)]}, queue, {"t": 8}, rebuild=Never())
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, rollouts("p/0"))
    news = await asyncio.wait_for(scorer.events(0), 5)
    assert news.lines[0] == "teacher t/0 is ejected: r: its process died"
    await scorer.shutdown()
    await asyncio.wait({running})


async def test_a_teacher_without_any_replica_left_ends_the_stage_with_its_name() -> None:
    async with stage(Fake(dead=True)) as (queue, running):
        await queue.put(TOPIC, rollouts("p/0"))
        with pytest.raises(BaseExceptionGroup) as caught:
            await asyncio.wait_for(running, 5)
        assert caught.group_contains(NoReplica, match="teacher t: all 1 replicas are gone", depth=1)


async def test_a_stage_that_is_shut_down_ends_what_it_rebuilt() -> None:
    class Closed(FakeRebuild):
        closed = False

        async def close(self) -> None:
            self.closed = True

    rebuild = Closed()
    async with stage(Fake(), rebuild=rebuild):
        await settle()
    assert rebuild.closed


async def test_a_stage_that_hands_over_ends_no_replica_and_names_those_of_now() -> None:
    class Open(FakeRebuild):
        async def close(self) -> None:
            raise AssertionError("closed")

    rebuild, fake = Open(), Fake()
    scorer = ScorerStage(
        {"t": [fake]}, MessageQueue(topics(["t"]), 1, 1, 1.0), {"t": 8}, {}, rebuild
    )
    running = asyncio.create_task(scorer.run())
    await settle()
    assert await scorer.hand_over() == ({"t": [fake]}, rebuild)
    assert running.done()


def test_the_scoring_stage_needs_neither_an_engine_nor_a_tokenizer() -> None:
    names = ("vllm", "torch", "transformers", "tokenizers")
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in names)
    subprocess.run([sys.executable, "-c", f"import sys;{absent}import teachers.stage"], check=True)


async def test_one_call_has_no_more_tokens_than_its_answer_may_weigh() -> None:
    fake = Fake()
    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)
    most = 2 * rollouts("p/0").tokens
    scorer = ScorerStage({"t": [fake]}, queue, {"t": 8}, call_tokens={"t": most})
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, rollouts(*(f"p/{index}" for index in range(5))))
    await asyncio.wait_for(queue.get(SCORED, 5, 5), 5)
    assert sorted(map(len, fake.scored)) == [1, 2, 2]
    await scorer.shutdown()
    await asyncio.wait({running})


async def test_in_a_scoring_phase_one_call_has_no_more_tokens_than_its_answer_may_weigh() -> None:
    fake = Sleepy()
    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)
    most = 2 * rollouts("p/0").tokens
    scorer = ScorerStage(
        {"t": [fake]},
        queue,
        {"t": 8},
        hosts={"t": "rollout"},
        backlog_size=5,
        call_tokens={"t": most},
    )
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, rollouts(*(f"p/{index}" for index in range(5))))
    await asyncio.wait_for(scorer.wait_for_backlog("rollout"), 5)
    await asyncio.wait_for(scorer.take_turn("rollout"), 5)
    assert sorted(map(len, fake.scored)) == [1, 2, 2]
    await scorer.shutdown()
    await asyncio.wait({running})


async def test_samples_enter_the_queue_in_messages_of_bounded_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = Batch.messages
    monkeypatch.setattr(Batch, "messages", lambda batches: messages(batches, 1))
    async with stage(Fake()) as (queue, _):
        sizes = []
        put = queue.put

        async def watched(topic: str, batch: Batch) -> None:
            sizes.append(len(batch))
            await put(topic, batch)

        queue.put = watched  # type: ignore[method-assign]
        await put(TOPIC, rollouts("p/0", "p/1", "p/2"))
        await asyncio.wait_for(queue.get(SCORED, 3, 3), 5)
        assert sizes == [1, 1, 1]


async def test_large_answers_are_checked_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[bool] = []

    def check(name: str, batch: Batch, samples: Batch) -> None:
        checked.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(slots, "check", check)
    monkeypatch.setattr(aside, "LARGE", 1)
    async with stage(Fake()) as (queue, _):
        await queue.put(TOPIC, rollouts("p/0"))
        await asyncio.wait_for(queue.get(SCORED, 1), 5)
    assert checked == [False]


def colocated(
    queue: MessageQueue, backlog_size: int = 8, rebuild: Any = None, **teachers: Fake
) -> ScorerStage:
    names = list(teachers)
    return ScorerStage(
        {name: [fake] for name, fake in teachers.items()},
        queue,
        dict.fromkeys(names, 8),
        rebuild=rebuild,
        hosts=dict.fromkeys(names, "rollout"),
        backlog_size=backlog_size,
    )


class GatedSleepy(Sleepy, Gated):
    """Shares its GPU, and scores when the gate is open."""


async def test_a_stage_that_hands_over_ends_its_scoring_phase_with_every_teacher_asleep() -> None:
    gate = asyncio.Event()
    first, second = GatedSleepy(gate), GatedSleepy(gate)
    queue = MessageQueue(topics(["a", "b"]), 64, 1 << 20, 60.0)
    scorer = colocated(queue, a=first, b=second)
    running = asyncio.create_task(scorer.run())
    await queue.put(rollouts_topic("a"), rollouts("p/0", "p/1"))
    await queue.put(rollouts_topic("b"), rollouts("q/0"))
    await settle()
    phase = asyncio.create_task(scorer.take_turn("rollout"))
    await settle()
    assert (first.awake, second.awake) == (True, False)
    await asyncio.wait_for(scorer.hand_over(), 5)
    gate.set()
    await settle()
    assert (first.awake, second.awake) == (False, False)
    with pytest.raises(StageError, match="a call was cancelled"):
        await phase
    assert running.done()


async def test_a_stage_that_hands_over_before_it_has_run_leaves_no_teacher_awake() -> None:
    left_awake = Sleepy()
    scorer = colocated(MessageQueue(topics(["t"]), 64, 1 << 20, 60.0), t=left_awake)
    await asyncio.wait_for(scorer.hand_over(), 5)
    assert not left_awake.awake


class Sleepless(Sleepy):
    """Does not go to sleep, because its process hangs or has died."""

    async def sleep(self) -> None:
        raise StageError("r", "going to sleep took too long")

    async def ready(self) -> int:
        raise StageError("r", "no answer")


async def test_a_stage_that_hands_over_ends_a_replica_that_does_not_go_to_sleep() -> None:
    sleepless = Sleepless()
    scorer = colocated(MessageQueue(topics(["t"]), 64, 1 << 20, 60.0), t=sleepless)
    await asyncio.wait_for(scorer.hand_over(), 5)
    assert not sleepless.awake


async def test_a_teacher_that_died_between_two_phases_is_rebuilt_in_its_turn_only() -> None:
    rebuilt: list[Sleepy] = []

    class Rebuild:
        async def __call__(self, teacher: str, index: int, old: Any) -> Any:
            rebuilt.append(Sleepy())
            return rebuilt[-1]

        async def displaced(self, old: Any) -> None: ...

        async def close(self) -> None: ...

    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)
    scorer = colocated(queue, rebuild=Rebuild(), t=Sleepless())
    running = asyncio.create_task(scorer.run())
    await asyncio.wait_for(scorer.wait_asleep("rollout"), 5)
    await queue.put(TOPIC, rollouts("p/0"))
    await settle()
    assert rebuilt == []  # the hosts have the GPUs
    await asyncio.wait_for(scorer.take_turn("rollout"), 5)
    assert [teacher.awake for teacher in rebuilt] == [False]
    await scorer.shutdown()
    await asyncio.wait({running})


async def test_a_scoring_phase_that_is_asked_of_the_next_stage_ends_when_its_teachers_sleep() -> (
    None
):
    class Slow(Sleepy):
        def __init__(self) -> None:
            super().__init__()
            self.gate = asyncio.Event()

        async def sleep(self) -> None:
            await self.gate.wait()
            await super().sleep()

    left_awake = Slow()
    scorer = colocated(MessageQueue(topics(["t"]), 64, 1 << 20, 60.0), t=left_awake)
    phase = asyncio.create_task(scorer.take_turn("rollout"))
    await settle()
    running = asyncio.create_task(scorer.run())
    await settle()
    assert (phase.done(), left_awake.awake) == (False, True)
    left_awake.gate.set()
    await asyncio.wait_for(phase, 5)
    assert not left_awake.awake
    await scorer.shutdown()
    await asyncio.wait({running})


async def test_a_request_to_a_colocated_teacher_ends_with_the_stage() -> None:
    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)
    scorer = colocated(queue, t=Sleepy())
    running = asyncio.create_task(scorer.run())
    asking = asyncio.create_task(scorer.generate("t", [], SAMPLING))
    await settle()
    await asyncio.wait_for(scorer.hand_over(), 5)
    with pytest.raises(StageError, match="a call was cancelled"):
        await asyncio.wait_for(asking, 5)
    assert running.done()


async def test_a_scoring_phase_of_a_teacher_without_replicas_ends_with_its_name() -> None:
    class Stubborn(Sleepy):
        async def sleep(self) -> None:
            raise StageError("r", "its process died")

        async def ready(self) -> int:
            raise StageError("r", "its process died")

    queue = MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)
    scorer = colocated(queue, t=Stubborn())
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, rollouts("p/0"))
    await asyncio.wait_for(scorer.wait_asleep("rollout"), 5)
    await settle()
    with pytest.raises(NoReplica, match="teacher t: all 1 replicas are gone"):
        await asyncio.wait_for(scorer.take_turn("rollout"), 5)
    await scorer.shutdown()
    await asyncio.wait({running})


@asynccontextmanager
async def in_a_scoring_phase(
    gate: asyncio.Event,
) -> AsyncIterator[tuple[ScorerStage, GatedSleepy, asyncio.Task[None]]]:
    """A stage whose scoring phase waits for the gate; its caller may have died."""
    teacher, queue = GatedSleepy(gate), MessageQueue(topics(["t"]), 64, 1 << 20, 60.0)
    scorer = colocated(queue, t=teacher)
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, rollouts("p/0"))
    await settle()
    phase = asyncio.create_task(scorer.take_turn("rollout"))
    await settle()
    yield scorer, teacher, phase
    await scorer.shutdown()
    await asyncio.wait({running, phase})


async def test_the_teachers_count_as_asleep_when_the_scoring_phase_of_a_dead_caller_has_ended() -> (
    None
):
    gate = asyncio.Event()
    async with in_a_scoring_phase(gate) as (scorer, teacher, _):
        waiting = asyncio.create_task(scorer.wait_asleep("rollout"))
        await settle()
        assert (waiting.done(), teacher.awake) == (False, True)
        gate.set()
        await asyncio.wait_for(waiting, 5)
        assert not teacher.awake


async def test_a_second_scoring_phase_begins_when_the_first_has_ended() -> None:
    gate = asyncio.Event()
    async with in_a_scoring_phase(gate) as (scorer, teacher, phase):
        second = asyncio.create_task(scorer.take_turn("rollout"))
        await settle()
        assert (phase.done(), second.done(), teacher.awake) == (False, False, True)
        gate.set()
        await asyncio.wait_for(asyncio.gather(phase, second), 5)
        assert not teacher.awake


async def test_a_stage_that_ends_in_a_scoring_phase_does_not_say_that_its_teachers_sleep() -> None:
    async with in_a_scoring_phase(asyncio.Event()) as (scorer, _, phase):
        waiting = asyncio.create_task(scorer.wait_asleep("rollout"))
        await settle()
        await scorer.shutdown()
        with pytest.raises(StageError, match="a call was cancelled"):
            await waiting
        with pytest.raises(StageError, match="a call was cancelled"):
            await phase


async def test_an_idle_teacher_whose_samples_do_not_fit_waits_for_room_in_the_queue() -> None:
    queue = MessageQueue(topics(["t"]), 1, 1 << 20, 60.0)
    scorer = ScorerStage({"t": [Fake()]}, queue, {"t": 8})
    running = asyncio.create_task(scorer.run())
    said = []
    for uid in ("p/0", "p/1"):  # the topic of scored samples has room for one
        await queue.put(TOPIC, rollouts(uid))
        await settle()
        said.append((await scorer.report())["t"].waits_for)
    await queue.get(SCORED, 1)
    await scorer.shutdown()
    await asyncio.wait({running})
    assert said == ["rollouts", "room in the queue"]


async def test_a_teacher_that_sleeps_waits_for_its_turn_on_the_gpus() -> None:
    queue = MessageQueue(topics(["t"]), 8, 1 << 20, 60.0)
    scorer = colocated(queue, t=Sleepy())
    running = asyncio.create_task(scorer.run())
    await settle()
    said = (await scorer.report())["t"].waits_for
    await scorer.shutdown()
    await asyncio.wait({running})
    assert said == "its scoring phase"
