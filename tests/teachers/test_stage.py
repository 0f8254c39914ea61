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
from async_opd.core.errors import Displaced, NoReplica, StageError
from async_opd.core.samples import DeadLetter, Sample
from async_opd.core.stages import DEAD, SCORED, SamplingSpec, rollouts_topic
from async_opd.queue.message_queue import MessageQueue
from async_opd.waiting import deadline as aside
from teachers import replica_slots as slots
from teachers.stage import ScorerStage
from tests.conftest import make_rollout
from tests.world.clock import ManualTimer, settle
from tests.world.places import FakePlaces
from tests.world.queue import message_queue
from tests.world.teachers import FakeRebuild, FakeTeacher

TOPIC = rollouts_topic("t")


def rollouts(*uids: str) -> Batch:
    return Batch.pack(make_rollout(uid) for uid in uids)


def many(count: int) -> Batch:
    return rollouts(*(f"p/{index}" for index in range(count)))


class Stage:
    """A scoring stage, its queue and its loop; time passes when a test says so."""

    def __init__(self, teachers: dict[str, FakeTeacher], size: int, **parts: Any) -> None:
        self.timer = ManualTimer()
        self.queue: MessageQueue = message_queue(*teachers, timer=self.timer, size=size)
        replicas: Any = {name: [teacher] for name, teacher in teachers.items()}
        sizes = dict.fromkeys(teachers, 8)
        self.scorer = ScorerStage(replicas, self.queue, sizes, timer=self.timer, **parts)
        self.running: asyncio.Task[None] | None = None

    def runs(self) -> asyncio.Task[None]:
        self.running = asyncio.create_task(self.scorer.run())
        return self.running

    async def put(self, batch: Batch, teacher: str = "t") -> None:
        """Rollouts, of which the stage knows then."""
        await self.queue.put(rollouts_topic(teacher), batch)
        await settle()

    async def scored(self, count: int = 9, at_least: int = 1) -> list[str]:
        """Uids of samples in the queue."""
        lease = await asyncio.wait_for(self.queue.get(SCORED, count, at_least), 5)
        return [sample.rollout.uid for sample in unpack(Sample, lease.batches)]

    async def turn(self) -> None:
        """A scoring phase on the hosts' GPUs."""
        await asyncio.wait_for(self.scorer.take_turn("rollout"), 5)

    async def asleep(self) -> None:
        """Returns when all teachers sleep."""
        await asyncio.wait_for(self.scorer.wait_asleep("rollout"), 5)


@asynccontextmanager
async def stage(
    *replicas: FakeTeacher,
    hosted: bool = False,
    starts: bool = True,
    backlog_size: int = 8,
    size: int = 64,
    **parts: Any,
) -> AsyncIterator[Stage]:
    """Of the teacher ``t``, or of ``a`` and ``b``; ``hosted`` on the GPUs of the students."""
    names = ["t"] if len(replicas) == 1 else ["a", "b"]
    if hosted:
        parts |= {"hosts": dict.fromkeys(names, "rollout"), "backlog_size": backlog_size}
    made = Stage(dict(zip(names, replicas, strict=True)), size, **parts)
    if starts:
        made.runs()
        await settle()
    try:
        yield made
    finally:
        await made.scorer.shutdown()
        if made.running is not None:
            await asyncio.wait({made.running})


async def test_rollouts_become_samples_and_those_that_cannot_be_scored_dead_letters() -> None:
    async with stage(FakeTeacher(poison=frozenset({"p/1"}))) as made:
        await made.put(many(3))
        dead = await asyncio.wait_for(made.queue.get(DEAD, 9), 5)
        assert [lost.header.uid for lost in unpack(DeadLetter, dead.batches)] == ["p/1"]
        assert sorted(await made.scored(9, 2)) == ["p/0", "p/2"]


async def test_rollouts_that_take_longer_to_score_than_a_lease_lasts_are_scored_once() -> None:
    fake = FakeTeacher(gate=asyncio.Event())
    async with stage(fake) as made:
        await made.put(many(1))
        for _ in range(300):
            await made.timer.passes(1)
        fake.gate.set()
        assert await made.scored() == ["p/0"]
        await settle()
        assert fake.scored == [("p/0",)]
        assert (await made.queue.stats())[TOPIC].acked == 1


async def test_a_lease_that_expired_meanwhile_is_scored_again_and_stops_nothing() -> None:
    queue, clock = message_queue("t", timer=(leases := ManualTimer())), ManualTimer()
    fake = FakeTeacher(gate=asyncio.Event())
    scorer = ScorerStage({"t": [fake]}, queue, {"t": 8}, timer=clock)
    running = asyncio.create_task(scorer.run())
    await queue.put(TOPIC, many(1))
    await settle()
    await leases.passes(60)  # the stage does not know of it
    fake.gate.set()
    lease = await asyncio.wait_for(queue.get(SCORED, 2, 2), 5)
    await settle()
    uids = [sample.rollout.uid for sample in unpack(Sample, lease.batches)]
    assert (uids, running.done()) == (["p/0", "p/0"], False)
    await scorer.shutdown()
    await asyncio.wait({running})


async def test_rollouts_that_wait_for_their_teachers_turn_are_held_once_however_long() -> None:
    async with stage(FakeTeacher(), hosted=True, backlog_size=64) as made:
        await made.put(many(8))
        for _ in range(300):
            await made.timer.passes(1)
        stats = (await made.queue.stats())[TOPIC]
        assert (stats.leased, stats.expired, stats.ready) == (8, 0, 0)


class Never(FakeRebuild):
    """Rebuilds for ever."""

    async def __call__(self, teacher: str, index: int, old: object) -> FakeTeacher:
        return await asyncio.get_running_loop().create_future()


async def test_the_end_of_a_replica_is_an_event_before_anything_is_scored() -> None:
    async with stage(FakeTeacher(dead=True), rebuild=Never()) as made:
        await made.put(many(1))
        events = await asyncio.wait_for(made.scorer.events(0), 5)
        assert events.lines[0] == "teacher t/0 is ejected: r: its process died"


async def test_a_teacher_without_any_replica_left_ends_the_stage_with_its_name() -> None:
    async with stage(FakeTeacher(dead=True)) as made:
        await made.put(many(1))
        with pytest.raises(BaseExceptionGroup) as caught:
            await asyncio.wait_for(made.running, 5)
        assert caught.group_contains(NoReplica, match="teacher t: all 1 replicas are gone", depth=1)


async def test_a_stage_that_ends_closes_its_rebuild_and_one_that_hands_over_does_not() -> None:
    rebuild = FakeRebuild()
    async with stage(FakeTeacher(), rebuild=rebuild):
        await settle()
    assert rebuild.closed
    rebuild, fake = FakeRebuild(), FakeTeacher()
    async with stage(fake, rebuild=rebuild) as made:
        assert await made.scorer.hand_over() == ({"t": [fake]}, rebuild)
        assert made.running.done()
        assert (rebuild.closed, fake.awake) == (False, True)


def test_the_scoring_stage_needs_neither_an_engine_nor_a_tokenizer() -> None:
    names = ("vllm", "torch", "transformers", "tokenizers")
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in names)
    subprocess.run([sys.executable, "-c", f"import sys;{absent}import teachers.stage"], check=True)


@pytest.mark.parametrize("hosted", [False, True])
async def test_one_call_has_no_more_tokens_than_its_answer_may_weigh(hosted: bool) -> None:
    fake, most = FakeTeacher(), 2 * rollouts("p/0").tokens
    async with stage(fake, hosted=hosted, backlog_size=5, call_tokens={"t": most}) as made:
        await made.put(many(5))
        if hosted:
            await asyncio.wait_for(made.scorer.wait_for_backlog("rollout"), 5)
            await made.turn()
        await made.scored(5, 5)
        assert sorted(map(len, fake.scored)) == [1, 2, 2]


async def test_messages_of_samples_have_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Batch.messages
    monkeypatch.setattr(Batch, "messages", lambda batches: messages(batches, 1))
    async with stage(FakeTeacher()) as made:
        sizes, put = [], made.queue.put

        async def watched(topic: str, batch: Batch) -> None:
            sizes.append(len(batch))
            await put(topic, batch)

        made.queue.put = watched
        await put(TOPIC, many(3))
        await made.scored(3, 3)
        assert sizes == [1, 1, 1]


async def test_large_answers_are_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bool] = []

    def check(name: str, batch: Batch, samples: Batch) -> None:
        checked.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(slots, "check", check)
    monkeypatch.setattr(aside, "LARGE", 1)
    async with stage(FakeTeacher()) as made:
        await made.put(many(1))
        await made.scored()
    assert checked == [False]


# ── teachers that share the students' GPUs ─────────────────────────────────────────────────────


async def test_a_stage_that_hands_over_ends_its_scoring_phase_with_every_teacher_asleep() -> None:
    gate = asyncio.Event()
    first, second = FakeTeacher(gate=gate), FakeTeacher(gate=gate)
    async with stage(first, second, hosted=True) as made:
        await made.put(many(2), "a")
        await made.put(rollouts("q/0"), "b")
        phase = asyncio.create_task(made.scorer.take_turn("rollout"))
        await settle()
        assert (first.awake, second.awake) == (True, False)
        await asyncio.wait_for(made.scorer.hand_over(), 5)
        gate.set()
        await settle()
        assert (first.awake, second.awake) == (False, False)
        with pytest.raises(StageError, match="a call was cancelled"):
            await phase
        assert made.running.done()


@pytest.mark.parametrize("dead", [False, True], ids=["asleep", "ended"])
async def test_a_hand_over_before_the_run_leaves_no_teacher_awake(dead: bool) -> None:
    """One that does not go to sleep, because its process has died, is ended."""
    left_awake = FakeTeacher(dead=dead)
    async with stage(left_awake, hosted=True, starts=False) as made:
        await asyncio.wait_for(made.scorer.hand_over(), 5)
        assert not left_awake.awake


async def test_a_teacher_that_died_between_two_phases_is_rebuilt_in_its_turn_only() -> None:
    rebuild = FakeRebuild()
    async with stage(FakeTeacher(dead=True), hosted=True, rebuild=rebuild) as made:
        await made.asleep()
        await made.put(many(1))
        assert rebuild.made == []  # the hosts have the GPUs
        await made.turn()
        assert [teacher.awake for teacher in rebuild.made] == [False]


async def test_a_teacher_whose_machine_was_lost_is_rebuilt_on_another_in_its_turn_only() -> None:
    rebuild = FakeRebuild()
    rebuild.displacement, rebuild.cluster = (
        Displaced("teacher t/0", "machine-b is lost"),
        FakePlaces(0),
    )
    async with stage(FakeTeacher(dead=True), hosted=True, rebuild=rebuild) as made:
        await made.asleep()
        await made.put(many(1))
        assert rebuild.made == []  # its new host may just be starting there
        await made.turn()
        assert [teacher.awake for teacher in rebuild.made] == [False]
        assert await made.scored() == ["p/0"]


async def test_a_scoring_phase_of_the_next_stage_ends_when_teachers_sleep() -> None:
    left_awake = FakeTeacher(bed=asyncio.Event())
    async with stage(left_awake, hosted=True, starts=False) as made:
        phase = asyncio.create_task(made.scorer.take_turn("rollout"))
        await settle()
        made.runs()
        await settle()
        assert (phase.done(), left_awake.awake) == (False, True)
        left_awake.bed.set()
        await asyncio.wait_for(phase, 5)
        assert not left_awake.awake


async def test_a_request_to_a_colocated_teacher_ends_with_the_stage() -> None:
    async with stage(FakeTeacher(), hosted=True) as made:
        asking = asyncio.create_task(made.scorer.generate("t", [], SamplingSpec(4, 0.0, 1.0, 1)))
        await settle()
        await asyncio.wait_for(made.scorer.hand_over(), 5)
        with pytest.raises(StageError, match="a call was cancelled"):
            await asyncio.wait_for(asking, 5)


async def test_a_scoring_phase_of_a_teacher_without_replicas_ends_with_its_name() -> None:
    async with stage(FakeTeacher(dead=True), hosted=True) as made:
        await made.put(many(1))
        await made.asleep()
        await settle()
        with pytest.raises(NoReplica, match="teacher t: all 1 replicas are gone"):
            await made.turn()


@asynccontextmanager
async def in_a_scoring_phase() -> AsyncIterator[
    tuple[ScorerStage, FakeTeacher, asyncio.Event, asyncio.Task[None]]
]:
    """A stage whose scoring phase waits for the gate; its caller may have died."""
    gate = asyncio.Event()
    teacher = FakeTeacher(gate=gate)
    async with stage(teacher, hosted=True) as made:
        await made.put(many(1))
        phase = asyncio.create_task(made.scorer.take_turn("rollout"))
        await settle()
        yield made.scorer, teacher, gate, phase
        await made.scorer.shutdown()
        await asyncio.wait({phase})


async def test_teachers_are_asleep_after_the_phase_of_a_dead_caller() -> None:
    async with in_a_scoring_phase() as (scorer, teacher, gate, _):
        waiting = asyncio.create_task(scorer.wait_asleep("rollout"))
        await settle()
        assert (waiting.done(), teacher.awake) == (False, True)
        gate.set()
        await asyncio.wait_for(waiting, 5)
        assert not teacher.awake


async def test_a_second_scoring_phase_begins_when_the_first_has_ended() -> None:
    async with in_a_scoring_phase() as (scorer, teacher, gate, phase):
        second = asyncio.create_task(scorer.take_turn("rollout"))
        await settle()
        assert (phase.done(), second.done(), teacher.awake) == (False, False, True)
        gate.set()
        await asyncio.wait_for(asyncio.gather(phase, second), 5)
        assert not teacher.awake


async def test_a_stage_that_ends_in_a_phase_answers_with_an_error() -> None:
    async with in_a_scoring_phase() as (scorer, _, _, phase):
        waiting = asyncio.create_task(scorer.wait_asleep("rollout"))
        await settle()
        await scorer.shutdown()
        for call in (waiting, phase):
            with pytest.raises(StageError, match="a call was cancelled"):
                await call


async def test_an_idle_teacher_whose_samples_do_not_fit_waits_for_room_in_the_queue() -> None:
    causes = []
    async with stage(FakeTeacher(), size=1) as made:
        for uid in ("p/0", "p/1"):  # the topic of scored samples has room for one
            await made.put(rollouts(uid))
            causes.append((await made.scorer.report())["t"].waits_for)
        await made.queue.get(SCORED, 1)
    assert causes == ["rollouts", "room in the queue"]


async def test_a_teacher_that_sleeps_waits_for_its_turn_on_the_gpus() -> None:
    async with stage(FakeTeacher(), hosted=True) as made:
        assert (await made.scorer.report())["t"].waits_for == "its scoring phase"
