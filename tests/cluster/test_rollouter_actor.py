"""The rollout stage in its actor: what it orders, when it has the GPUs, and how it takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.cluster.rollouter_actor import (
    Orders,
    Predecessor,
    RollouterService,
    StartedReplica,
    build_rollouter,
)
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import EngineStartError, ProcessDied, StageError, first_cause
from async_opd.core.reports import Progress
from async_opd.core.samples import Prompt
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.sharing.gpu_turns import GpuTurns
from async_opd.waiting.deadline import Timer
from async_opd.weight_sync.layout import WeightMeta
from tests.cluster.simulated import config
from tests.world.clock import ManualTimer, settle
from tests.world.students import FakeReplica
from tests.world.sync import META, Sender

NEWEST = (7, META)
PROMPTS = [Prompt(Uid("0:0"), "data", "t", np.zeros(1, np.int32))]
GREEDY = SamplingSpec(1, 0.0, 1.0, 1)


class TurnTakingTrainer(Sender):
    """A trainer on the students' GPUs, which it uses in its turns only."""

    def __init__(self, students: list[FakeReplica], timer: Timer | None = None) -> None:
        super().__init__()
        self.students = students
        self.turns = GpuTurns(0.0, timer)
        self.asleep = asyncio.Event()
        self.moves: list[str] = []

    async def _onload(self) -> None:
        assert all(student.asleep for student in self.students if not student.killed)
        self.moves.append("onload")

    async def _offload(self) -> None:
        self.moves.append("offload")

    async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
        async with self.turns:
            self.moves.append(f"snapshot {version}")
        self.turns.release()
        return await super().snapshot(version, compare)

    async def begin_turn(self, pool: str) -> None:
        await self.turns.hold(60)

    async def wait_asleep(self, pool: str) -> None:
        await self.asleep.wait()

    async def wait_for_work(self, pool: str) -> None:
        await self.turns.wanted()

    async def wait_for_backlog(self, pool: str) -> None:
        await self.turns.wanted()

    async def take_turn(self, pool: str) -> None:
        await self.turns.take(self._onload, self._offload)


class Queue:
    def __init__(self) -> None:
        self.released: list[str] = []

    async def release(self, topic: str, consumer: str) -> int:
        self.released.append(consumer)
        return 0


class Teachers:
    """Those on the students' GPUs; they sleep when ``asleep`` is set."""

    def __init__(self) -> None:
        self.asleep = asyncio.Event()

    async def wait_asleep(self, host: str) -> None:
        await self.asleep.wait()

    async def wait_for_work(self, host: str) -> None:
        await asyncio.Event().wait()

    async def progress(self) -> Progress:
        return Progress(0)


def run_config(hosts: str = "") -> RunConfig:
    """Of a run with a teacher on the GPUs of each of the pools ``hosts``."""
    teachers = {
        f"t{index}": {"model": "t", "placement": "colocated", "with": host}
        for index, host in enumerate(hosts.split())
    }
    return config(Path("run"), teachers=teachers or {"t": {"model": "t", "replicas": 2}})


class World:
    """A service over two students; whatever it orders is ``started`` when the test says so."""

    def __init__(self, *students: FakeReplica) -> None:
        self.students = list(students) or [FakeReplica("student/0"), FakeReplica("student/1")]
        self.queue, self.teachers, self.sender = Queue(), Teachers(), Sender()
        self.tasks: list[asyncio.Task[Any]] = []
        self.seen = 0

    async def runs(
        self, host: str = "", newest: Any = None, rebuilds: int = 0, behind: bool = False
    ) -> RollouterService:
        parts: list[Any] = [self.queue, self.sender, self.teachers]
        replicas: Any = [StartedReplica(student, 1) for student in self.students]  # type: ignore[arg-type]
        before = Predecessor(newest, rebuilds, behind)
        self.service = await build_rollouter(
            run_config(host), replicas, *parts, GpuBundles(), before
        )
        self.tasks.append(asyncio.create_task(self.service.run()))
        await settle()
        return self.service

    async def in_a_phase(self, host: str = "train") -> RollouterService:
        """A service with snapshot 3, while a teacher has the trainer's GPU."""
        self.teachers.asleep.set()
        service = await self.runs(host)
        await service.snapshot(3)
        await service.gpus.locks["train"].acquire("a scoring phase")
        return service

    async def ordered(self) -> list[int]:
        """Members of the new orders."""
        await settle()
        try:
            async with asyncio.timeout(0.01):
                orders = await self.service.replica_orders(self.seen)
        except TimeoutError:
            return []
        self.seen = max(order.number for order in orders)
        self.numbers = {order.index: order.number for order in orders}
        return [order.index for order in orders]

    async def die(self, *indices: int) -> list[int]:
        """These students die, or all. Members of the orders that follow."""
        for index in indices or range(len(self.students)):
            self.students[index].die()
        return await self.ordered()

    async def delivers(self, index: int) -> FakeReplica:
        student: Any = FakeReplica(f"student/{index}")
        await self.service.deliver(self.numbers[index], StartedReplica(student, 1))
        await settle()
        return student

    @property
    def serving(self) -> list[Any]:
        return [member.value for member in self.service.stage.members.serving]


@pytest.fixture
async def world() -> Any:
    made = World()
    yield made
    for task in made.tasks:
        task.cancel()


@pytest.mark.parametrize("host", ["", "rollout", "train"])
async def test_replicas_that_died_are_ordered_together_and_serve_with_the_newest_weights(
    world: World, host: str
) -> None:
    if host != "train":  # no turn of its teachers is waited for before replicas are ordered
        world.teachers.asleep.set()
    service = await world.runs(host, rebuilds=2)
    assert await world.ordered() == []
    assert [student.version for student in world.students] == [0, 0]  # no snapshot, no weights
    if host == "train":
        assert await world.die() == [0, 1]
        return
    await service.snapshot(3)
    assert await world.die() == [0, 1]
    others = [await world.delivers(index) for index in (0, 1)]
    assert world.serving == others
    assert [student.version for student in others] == [3, 3]
    assert all(student.killed for student in world.students)
    assert world.queue.released == ["student/0#0", "student/1#0"]
    assert (await service.report()).gauges["rebuilds"] == 2 + 2
    lines = (await service.events(0)).lines
    assert lines[0] == "student/0 is ejected: student/0: its process died"
    assert lines[-1] == "student/1 is rebuilt"


@pytest.mark.slow
async def test_a_replica_that_cannot_be_started_is_ordered_again(world: World) -> None:
    service = await world.runs()
    assert await world.die(1) == [1]
    failed = EngineStartError("student/1", "no memory")
    await service.deliver(world.numbers[1], failed)
    await asyncio.sleep(run_config().supervision.delay_s * 1.1)
    assert await world.ordered() == [1]


class TestTakingOver:
    async def test_replicas_that_live_get_the_newest_weights_and_go_on_also_from_within_a_sync(
        self, world: World
    ) -> None:
        world.students[1].paused = True
        await world.runs(newest=NEWEST)
        assert await world.ordered() == []
        assert (world.serving, world.queue.released) == (world.students, [])
        assert [student.version for student in world.students] == [7, 7]
        assert not any(student.paused for student in world.students)

    async def test_a_replica_that_died_meanwhile_is_found_and_ordered(self, world: World) -> None:
        world.students[0].die()
        await world.runs(newest=NEWEST)
        assert await world.ordered() == [0]
        student = await world.delivers(0)
        assert student.version == 7

    async def test_engines_left_asleep_wake_before_they_get_weights(self, world: World) -> None:
        for student in world.students:
            student.asleep = True
        await world.runs("rollout", NEWEST)
        assert all(student.asleep for student in world.students)  # a teacher has the GPUs
        world.teachers.asleep.set()
        await settle()
        assert [student.asleep for student in world.students] == [False, False]
        assert [student.version for student in world.students] == [7, 7]

    @pytest.mark.parametrize("host", ["", "rollout"])
    async def test_a_replica_without_the_newest_weights_neither_serves_nor_answers_before_them(
        self, host: str
    ) -> None:
        student = FakeReplica("student/0", holds=("pause", "join", "generate"))
        world = World(student)
        service = await world.runs(host, newest=NEWEST)
        answer = asyncio.create_task(service.generate(PROMPTS, GREEDY))
        await settle()
        assert student.calls == []
        student.goes_on.set()
        world.teachers.asleep.set()
        await settle()
        assert sorted(student.calls) == [("generate", 7), ("run", 7)]
        answer.cancel()
        world.tasks[0].cancel()

    @pytest.mark.parametrize("host", ["", "rollout"])
    async def test_after_a_snapshot_that_broke_off_no_replica_serves_before_the_drivers_push(
        self, host: str
    ) -> None:
        student = FakeReplica("student/0")
        world = World(student)
        world.teachers.asleep.set()
        service = await world.runs(host, behind=True)
        answer = asyncio.create_task(service.generate(PROMPTS, GREEDY))
        await settle()
        assert student.calls == []
        await service.snapshot(8)
        await service.push()
        await settle()
        assert sorted(student.calls) == [("generate", 8), ("run", 8)]
        answer.cancel()
        world.tasks[0].cancel()

    async def test_supervision_ends_and_the_replicas_go_on(self, world: World) -> None:
        service = await world.runs()
        await service.shutdown()
        assert not any(student.killed or student.paused for student in world.students)
        assert world.tasks[0].done()


class TestShutdown:
    @pytest.mark.parametrize("method", ["push", "connect", "snapshot"])
    async def test_a_call_of_the_driver_ends_with_the_supervision_and_changes_no_replica(
        self, method: str
    ) -> None:
        async def never(version: int, compare: bool = False) -> None:
            await asyncio.Event().wait()

        student = FakeReplica("student/0", holds=("pause", "join"))
        world = World(student)
        service = await world.runs()
        await service.snapshot(8)
        if method == "snapshot":
            world.sender.snapshot = never  # type: ignore[method-assign, assignment]
        arguments = (9,) if method == "snapshot" else ()
        call = asyncio.create_task(getattr(service, method)(*arguments))
        await settle()
        await service.shutdown()
        assert call.done()
        with pytest.raises(StageError, match="a call was cancelled"):
            await call
        student.goes_on.set()
        await settle()
        assert student.version == 0


class TestGpus:
    async def test_no_replica_is_ordered_before_no_teacher_has_its_gpu(self, world: World) -> None:
        await world.runs("rollout")
        assert await world.die(0) == []
        world.teachers.asleep.set()
        assert await world.ordered() == [0]

    async def test_no_turn_begins_before_all_ordered_replicas_joined(self, world: World) -> None:
        world.teachers.asleep.set()
        service = await world.runs("rollout")
        assert await world.die() == [0, 1]
        await world.delivers(0)
        assert service.gpus.locks["rollout"].locked()
        await world.delivers(1)
        assert not service.gpus.locks["rollout"].locked()

    @pytest.mark.parametrize("call", ["snapshot", "push", "a new replica"])
    async def test_no_weights_are_copied_or_sent_while_a_teacher_is_awake_on_the_trainers_gpu(
        self, world: World, call: str
    ) -> None:
        service = await world.in_a_phase()
        if call == "a new replica":
            assert await world.die(0) == [0]
            student = await world.delivers(0)
            assert student.version == 0
            service.gpus.locks["train"].release()
            await settle()
            assert student.version == 3
            return
        again = asyncio.create_task(service.snapshot(4) if call == "snapshot" else service.push())
        await settle()
        assert not again.done()
        assert world.sender.events.count("send") + len(world.sender.compared) == 1
        service.gpus.locks["train"].release()
        await asyncio.wait_for(again, 5)

    async def test_a_sync_that_waits_for_a_rebuild_does_not_keep_teachers_from_the_trainers_gpu(
        self, world: World
    ) -> None:
        world.teachers.asleep.set()
        service = await world.runs("rollout train")
        await service.snapshot(3)
        assert await world.die(0) == [0]
        push = asyncio.create_task(service.push())
        await settle()
        assert (push.done(), service.gpus.locks["train"].locked()) == (False, False)
        await service.gpus.locks["train"].acquire("a scoring phase")
        student = await world.delivers(0)
        assert (push.done(), student.version) == (False, 0)
        service.gpus.locks["train"].release()
        await asyncio.wait_for(push, 5)
        assert student.version == 3

    async def test_the_trainer_of_a_stage_that_died_in_a_scoring_phase_is_woken_by_the_next(
        self, world: World
    ) -> None:
        service = await world.runs("train")
        assert service.gpus.locks["train"].locked()
        world.teachers.asleep.set()
        await settle()
        assert not service.gpus.locks["train"].locked()


async def synced(service: RollouterService, version: int) -> None:
    """A whole weight sync."""
    await asyncio.wait_for(service.snapshot(version), 5)
    await asyncio.wait_for(service.push(), 5)


class TestTrainerOnTheStudentsGpus:
    """``rollout.placement: colocated``: the trainer is the students' guest."""

    async def runs(
        self,
        world: World,
        teachers: dict[str, Any] | None = None,
        evaluators: Sequence[FakeReplica] = (),
        timer: Timer | None = None,
    ) -> tuple[RollouterService, TurnTakingTrainer]:
        trainer = TurnTakingTrainer(world.students, timer)
        parts: list[Any] = [world.queue, trainer, world.teachers]
        students = [*world.students, *evaluators]
        replicas: Any = [StartedReplica(student, 1) for student in students]  # type: ignore[arg-type]
        rollout = {"placement": "colocated", "with": "train", "replicas": 2}
        teachers = teachers or {"t": {"model": "t"}}
        made = config(
            Path("run"),
            rollout=rollout,
            train={"ranks": 2},
            teachers=teachers,
            eval={"every": 1, "replicas": len(evaluators)},
        )
        world.service = await build_rollouter(made, replicas, *parts, GpuBundles(), Predecessor())
        world.tasks.append(asyncio.create_task(world.service.run()))
        await settle()
        return world.service, trainer

    @pytest.mark.parametrize("teacher", [False, True])
    async def test_the_students_wake_when_the_trainer_and_teachers_on_their_gpus_sleep(
        self, world: World, teacher: bool
    ) -> None:
        for student in world.students:
            student.asleep = True
        guest = {"model": "t", "placement": "colocated", "with": "rollout"}
        service, trainer = await self.runs(world, {"t": guest} if teacher else None)
        assert service.gpus.locks.keys() == {"rollout"}
        assert [student.asleep for student in world.students] == [True, True]
        trainer.asleep.set()
        await settle()
        assert service.gpus.locks["rollout"].locked() == teacher
        world.teachers.asleep.set()
        await settle()
        assert [student.asleep for student in world.students] == [False, False]
        assert not service.gpus.locks["rollout"].locked()

    async def test_a_snapshot_is_taken_while_they_sleep_and_pushed_when_they_are_awake(
        self, world: World
    ) -> None:
        service, trainer = await self.runs(world)
        trainer.asleep.set()
        await synced(service, 3)
        assert trainer.moves == ["onload", "snapshot 3", "offload"]
        assert [student.version for student in world.students] == [3, 3]

    async def test_a_snapshot_and_a_rebuild_at_the_same_time_do_not_wait_for_each_other_for_ever(
        self, world: World
    ) -> None:
        service, trainer = await self.runs(world)
        trainer.asleep.set()
        await synced(service, 3)
        assert await world.die(0) == [0]
        snapshot = asyncio.create_task(service.snapshot(4))
        await settle()
        student = await world.delivers(0)
        trainer.students[0] = student
        await asyncio.wait_for(snapshot, 5)
        await asyncio.wait_for(service.push(), 5)
        assert student.version == 4

    async def test_a_snapshot_a_rebuild_and_a_slow_evaluation_do_not_wait_for_each_other_for_ever(
        self, world: World
    ) -> None:
        """The hold of a turn ends while an evaluation replica still gets the weights before."""
        slow, timer = FakeReplica("eval/0", holds=("receive",), hang="generate"), ManualTimer()
        service, trainer = await self.runs(world, evaluators=[slow], timer=timer)
        trainer.asleep.set()
        await synced(service, 3)
        world.tasks.append(asyncio.create_task(service.generate(PROMPTS, GREEDY)))
        await settle()
        snapshot = asyncio.create_task(service.snapshot(4))
        await settle()
        world.students[0].die()
        await settle()
        timer.advance(60)
        assert await world.ordered() == [0]
        slow.goes_on.set()
        await settle()
        trainer.students[0] = await world.delivers(0)
        await asyncio.wait_for(snapshot, 5)
        await asyncio.wait_for(service.push(), 5)
        assert [student.version for student in world.serving] == [4, 4]

    async def test_a_trainer_that_dies_while_it_is_waited_for_ends_the_stage_with_its_name(
        self, world: World
    ) -> None:
        service, trainer = await self.runs(world)
        trainer.asleep.set()

        async def dies(pool: str) -> None:
            raise ProcessDied("trainer", "its process died")

        trainer.take_turn = dies  # type: ignore[method-assign]
        snapshot = asyncio.create_task(service.snapshot(3))
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(world.tasks[-1], 5)
        error = first_cause(caught.value)
        assert isinstance(error, ProcessDied)
        assert error.stage == "trainer"
        snapshot.cancel()


class TestOrders:
    async def test_orders_are_returned_once_also_those_of_the_next_actor_whose_clock_is_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(time, "time_ns", iter(range(10**9, 0, -1)).__next__)
        seen = 0
        for _ in range(2):
            orders = Orders()
            first = asyncio.create_task(orders.replica(0))
            (order,) = await asyncio.wait_for(orders.after(seen), 5)
            assert order.number != seen
            seen = order.number
            second = asyncio.create_task(orders.replica(1))
            assert [found.index for found in await orders.after(seen)] == [1]
            for task in (first, second):
                task.cancel()

    async def test_the_error_of_a_start_is_raised_where_it_was_ordered(self) -> None:
        orders = Orders()
        task = asyncio.create_task(orders.replica(0))
        (order,) = await orders.after(0)
        orders.answer(order.number, EngineStartError("student/0", "no memory"))
        with pytest.raises(EngineStartError, match="no memory"):
            await task
        orders.answer(order.number, EngineStartError("student/0", "late"))  # nobody waits for it
