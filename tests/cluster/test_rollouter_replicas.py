"""The driver starts the replicas that the rollouter's actor orders, and owns them; on fakes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from async_opd.cluster.launch import LaunchedStages
from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.cluster.rollouter_actor import Order, Predecessor, StartedReplica
from async_opd.cluster.rollouter_replicas import RollouterActor
from async_opd.core.errors import (
    Displaced,
    EngineStartError,
    ProcessDied,
    ProcessRestarts,
    StageError,
    StageTimeout,
    WeightSyncError,
)
from async_opd.core.reports import SyncReport
from async_opd.waiting.waits import Waits
from async_opd.weight_sync.layout import WeightMeta
from tests.cluster.simulated import config
from tests.world.clock import settle
from tests.world.students import FakeReplica
from tests.world.sync import META


class Actor:
    """The rollouter's process, its proxy, and who starts students for it."""

    name = "rollouter"
    config = config(Path("run"))
    bundles = GpuBundles()

    def __init__(self) -> None:
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.answers: dict[int, Any] = {}
        self.built: list[Any] = []
        self.started: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.broken = False
        self.asked: list[str] = []

    async def build(self, factory: str, args: tuple[Any, ...], timeout_s: float) -> None:
        self.built.append(args)

    async def replica_orders(self, seen: int) -> tuple[Order, ...]:
        return (await self.orders.get(),)

    async def deliver(self, number: int, answer: Any) -> None:
        self.answers[number] = answer

    async def student(self, index: int, queue: Any, incarnation: int) -> FakeReplica:
        await self.may_start.wait()
        if self.broken:
            raise EngineStartError(f"student/{index}", "no memory")
        self.started.append(f"student/{index}#{incarnation}")
        return FakeReplica(f"student/{index}")

    async def snapshot(self, version: int) -> WeightMeta:
        self.asked.append(f"snapshot {version}")
        if self.broken:
            raise ProcessDied("trainer", "its process died")
        return META

    async def push(self) -> SyncReport:
        self.asked.append("push")
        return SyncReport(1, {"sync/seconds": 1.0})

    async def call(self, method: str, timeout_s: float) -> None:
        self.asked.append(method)
        if self.broken:
            raise ProcessDied("rollouter", "its process died")


class World:
    def __init__(self) -> None:
        self.actor: Any = Actor()
        self.students: list[Any] = [FakeReplica("student/0"), FakeReplica("student/1")]
        replicas = [StartedReplica(student, 2) for student in self.students]
        self.rollouter = RollouterActor(self.actor, self.actor, replicas, *["stage"] * 3)  # type: ignore[arg-type]
        self.rollouter.proxy = self.actor
        self.supply = asyncio.create_task(self.rollouter.supply())

    async def orders(self, number: int, index: int) -> None:
        self.actor.orders.put_nowait(Order(number, index))
        await settle(20)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.supply.cancel()


async def test_an_ordered_replica_is_started_under_another_name_for_the_queue(world: World) -> None:
    await world.orders(1, 0)
    await world.orders(2, 0)
    await world.orders(3, 1)
    assert world.actor.started == ["student/0#1", "student/0#2", "student/1#1"]
    assert [world.actor.answers[number].workers for number in (1, 2, 3)] == [2, 2, 2]
    world.actor.may_start.clear()
    await world.orders(4, 0)
    await world.orders(5, 1)
    world.actor.may_start.set()
    await world.orders(6, 0)
    assert set(world.actor.answers) == {1, 2, 3, 4, 5, 6}  # some at the same time


async def test_the_error_of_a_start_is_the_answer(world: World) -> None:
    world.actor.broken = True
    await world.orders(1, 0)
    assert isinstance(world.actor.answers[1], EngineStartError)
    assert world.rollouter.replicas[0].student is world.students[0]


async def test_a_replica_that_was_not_waited_for_any_more_ends_before_the_next(
    world: World,
) -> None:
    await world.orders(1, 0)
    dropped = world.rollouter.replicas[0].student
    await world.orders(2, 0)
    assert dropped.killed
    assert not world.rollouter.replicas[0].student.killed


async def test_answers_for_an_earlier_actor_end_before_the_next_is_built(world: World) -> None:
    world.students[0].die()
    await world.rollouter.build()
    assert world.students[1].events == ["stop evaluation"]
    ((*_, before),) = world.actor.built
    assert not before.behind


async def test_the_next_actor_has_the_replicas_of_now_and_the_newest_snapshot(world: World) -> None:
    await world.orders(1, 1)
    await world.rollouter.snapshot(4)
    await world.rollouter.build()
    ((_, replicas, *_, before),) = world.actor.built
    assert replicas == (StartedReplica(world.students[0], 2), world.actor.answers[1])
    assert before == Predecessor((4, META), rebuilds=1, behind=True)


async def test_what_the_actor_before_had_ordered_is_not_started_for_the_next(world: World) -> None:
    world.actor.may_start.clear()
    await world.orders(1, 0)
    await world.rollouter.build()
    world.actor.may_start.set()
    await world.orders(2, 1)
    assert set(world.actor.answers) == {2}
    assert world.actor.started == ["student/1#1"]


class Refresh:
    """The refresh of teachers that are the student, in the same list as the rollouter's calls."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    async def copy(self, version: int, again: bool) -> None:
        self.asked.append(f"copy {version} {again}")

    async def load(self) -> dict[str, float]:
        self.asked.append("load")
        return {"sync/teachers_s": 2.0}


async def test_teachers_that_are_the_student_have_its_weights_first(world: World) -> None:
    refresh: Any = Refresh(world.actor.asked)
    world.rollouter.refresh = refresh
    await world.rollouter.snapshot(4, again=True)
    report = await world.rollouter.push()
    assert world.actor.asked == ["snapshot 4", "copy 4 True", "load", "push"]
    assert report.metrics == {"sync/seconds": 1.0, "sync/teachers_s": 2.0}


async def test_after_a_snapshot_that_broke_off_nobody_pushes_the_one_before(world: World) -> None:
    await world.rollouter.snapshot(4)
    world.actor.broken = True
    with pytest.raises(ProcessDied):
        await world.rollouter.snapshot(5)
    await world.rollouter.build()
    assert world.actor.built[0][-1].newest is None
    assert world.actor.built[0][-1].behind


async def test_before_a_trainer_begins_anew_every_replica_stops_or_is_ended(world: World) -> None:
    world.students += [FakeReplica("student/2"), FakeReplica("student/3", hang="stop")]
    world.students[2].die()
    world.rollouter.replicas = [StartedReplica(student, 2) for student in world.students]
    await world.rollouter.snapshot(4)
    await world.rollouter.halt_replicas(0.01)
    assert [student.events for student in world.students] == [["stop"]] * 2 + [["kill"]] * 2
    assert world.rollouter.newest is None
    rollout = {"placement": "colocated", "with": "train", "replicas": 2}
    world.actor.config = config(Path("run"), rollout=rollout)
    await world.rollouter.halt_replicas(0.01)  # on the trainer's GPUs they sleep, too
    assert world.students[0].events == ["stop", "stop", "sleep"]


DIGESTS = {"w": "float32[2, 3]:0"}


async def verified(world: World, *digests: dict[str, str]) -> None:
    """A version is pushed; the replicas have weights of these digests now."""
    world.actor.snapshot = AsyncMock(return_value=replace(META, digests=tuple(DIGESTS.values())))
    for student, found in zip(world.students, digests, strict=True):
        student.digests = found
    await world.rollouter.snapshot(4)
    assert world.rollouter.verified is None  # it is not compared yet
    await world.rollouter.push()


async def test_the_first_replica_that_has_the_verified_weights_writes_them(world: World) -> None:
    await verified(world, {"w": "float32[2, 3]:1"}, DIGESTS)
    assert world.rollouter.verified is not None
    assert world.rollouter.verified[0] == 4
    found = await world.rollouter.write_verified("folder", 5)
    assert found == ("folder/1", "student/1 (float32)")  # others may still write, elsewhere
    await world.rollouter.halt_replicas(5)
    assert world.rollouter.verified is None  # the next trainer counts its own versions


async def test_without_a_replica_that_has_them_all_is_named_that_was_asked(world: World) -> None:
    await verified(world, {}, DIGESTS)
    world.students[1].die()
    words = "student/0 has other weights in 1 of 1 tensors(?s:.*)student/1: its process died"
    with pytest.raises(StageError, match=words):
        await world.rollouter.write_verified("folder", 5)


async def test_a_replica_that_hangs_while_it_writes_is_left(world: World) -> None:
    await verified(world, DIGESTS, DIGESTS)
    world.students[0].hangs = True
    found = await world.rollouter.write_verified("folder", 0.01)
    assert found == ("folder/1", "student/1 (float32)")


@pytest.mark.parametrize("dead", [False, True])
async def test_no_replica_is_supervised_while_it_writes(world: World, dead: bool) -> None:
    await verified(world, DIGESTS, DIGESTS)
    world.actor.broken = dead  # a dead actor supervises nothing, either
    world.actor.state_s = 5.0
    write = world.students[0].write_weights

    async def writing(*given: Any) -> Any:
        world.actor.asked.append("write")
        return await write(*given)

    world.students[0].write_weights = writing
    own, singletons = world.actor, SimpleNamespace(config=world.actor.config)
    singletons.rollouter = world.rollouter
    stages = LaunchedStages(own, own, own, own, own, singletons, own)  # type: ignore[arg-type]
    await stages.write_verified("folder")
    assert world.actor.asked[-2:] == ["shutdown", "write"]


class Starting(Actor):
    """The rollouter's process at the launch; nobody rebuilds one that restarts in ``connect``.

    ``answer`` is that of this call; none ever comes if it is None.
    """

    def __init__(self, answer: BaseException | str | None) -> None:
        super().__init__()
        self.answer = answer
        self.stages: list[Any] = []
        self.dropped: list[Any] = []
        self.notify = self.asked.append
        self.drop = self.dropped.append
        self.waits = Waits(self.asked.append)
        self.waiting = lambda name: self.waits.on(name, 0.05)
        timeouts = self.config.timeouts.model_copy(update={"engine_start_s": 0.05})
        self.config = self.config.model_copy(update={"timeouts": timeouts})

    async def call(self, method: str, timeout_s: float, retry: bool = False) -> None:
        assert (method, timeout_s) == ("connect", math.inf)
        if isinstance(self.answer, BaseException) and not retry:  # Remote would repeat it
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()


class Engine(FakeReplica):
    """One that is ready, and whose machine is lost if it is ``displaced``."""

    def __init__(self, name: str, lost: bool = False, ready: bool = True) -> None:
        super().__init__(name)
        self.remote, self.is_ready = self, ready
        self.lost = Displaced(name, "gpu-b is lost") if lost else None

    async def ready(self) -> int:
        if not self.is_ready:
            raise ProcessDied(self.name, "its process died")
        return 1

    async def displaced(self) -> Displaced | None:
        return self.lost


class TestStart:
    async def starts(
        self,
        answer: BaseException | str | None,
        *students: Engine,
        trainer: Engine | None = None,
    ) -> tuple[RollouterActor, list[str]]:
        process: Any = Starting(answer)
        given: Any = students or [Engine("student/0")]
        unused: Any = "stage"
        beside: Any = trainer or Engine("trainer")
        async with asyncio.timeout(5):
            start = RollouterActor.start(process, process, given, unused, beside, unused)
            return await start, process.asked

    async def test_a_student_whose_machine_is_lost_is_left_to_its_pool(self) -> None:
        students = Engine("student/0"), Engine("student/1", lost=True, ready=False)
        made, lines = await self.starts("connected", *students)
        assert [one and one.student for one in made.replicas] == [students[0], None]
        assert "student/1: it is started later: gpu-b is lost" in lines

    async def test_a_student_that_dies_on_a_machine_that_lives_ends_the_launch(self) -> None:
        with pytest.raises(ProcessDied, match="student/1: its process died"):
            await self.starts(None, Engine("student/0"), Engine("student/1", ready=False))

    async def test_a_sync_group_whose_member_loses_its_machine_connects_later(self) -> None:
        broken = WeightSyncError("weight sync", "student/1 did not connect")
        made, lines = await self.starts(broken, Engine("student/0"), Engine("student/1", lost=True))
        assert lines[-1] == ("the first weight sync connects the others: student/1: gpu-b is lost")
        assert len(made.engines) == 2  # supervision finds the dead one

    async def test_an_error_of_a_sync_group_without_the_lost_student_ends_the_launch(self) -> None:
        broken = WeightSyncError("weight sync", "student/0 did not connect")
        with pytest.raises(WeightSyncError, match="student/0 did not connect"):
            await self.starts(
                broken, Engine("student/0"), Engine("student/1", lost=True, ready=False)
            )

    async def test_a_sync_group_without_the_trainer_ends_the_launch(self) -> None:
        broken = WeightSyncError("weight sync", "student/1 did not connect")
        trainer = Engine("trainer", lost=True)
        students = Engine("student/0"), Engine("student/1", lost=True)
        with pytest.raises(WeightSyncError, match="did not connect"):
            await self.starts(broken, *students, trainer=trainer)

    async def test_a_process_that_dies_while_it_connects_ends_the_launch(self) -> None:
        with pytest.raises(ProcessRestarts, match="its process died"):
            await self.starts(ProcessRestarts("rollouter", "its process died"))

    async def test_a_process_that_never_connects_ends_the_launch_at_its_bound(self) -> None:
        with pytest.raises(StageTimeout, match=r"raise timeouts\.engine_start_s"):
            await self.starts(None)
