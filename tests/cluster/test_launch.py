"""A teacher that shares GPUs is built before its host, where that one is, on made-up processes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.checks.gpu_plan import RANKS, Bundle, Unit, units
from async_opd.checks.resources import pools
from async_opd.cluster.actor_factory import ActorFactory, Factories
from async_opd.cluster.actor_names import ActorName, student
from async_opd.cluster.actor_shell import ActorPlacement
from async_opd.cluster.launch import _build, _started
from async_opd.cluster.placement import gpu_bundles
from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.cluster.proxies import TeacherProxy
from async_opd.cluster.remote import Remote
from async_opd.cluster.singleton_actors import (
    QueueActor,
    ScorerActor,
    TrainerActor,
    _RebuildTeacher,
)
from async_opd.cluster.watching import ClusterWatch
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import HealthConfig
from async_opd.core.errors import Displaced, EngineStartError, StageError
from async_opd.processes.events import State
from async_opd.processes.own_settings import KEEPS
from teachers.replica_slots import ReplicaSlots
from tests.world.clock import settle
from tests.world.config import run_config
from tests.world.places import FakePlaces
from tests.world.processes import FakeHandle, FakeProcess

GUEST = {"model": "t", "placement": "colocated", "with": "rollout"}


def config(start_s: float, **sections: Any) -> RunConfig:
    """Of a run whose teacher shares the GPUs of the student."""
    return run_config(
        **{"teachers": {"t": GUEST}, "timeouts": {"engine_start_s": start_s}} | sections
    )


async def test_a_guest_that_does_not_go_to_sleep_is_ended_and_named() -> None:
    class Engine:
        name = "teacher t/0"
        killed = False

        async def call(self, *args: Any, timeout_s: float, retry: bool) -> None:
            await asyncio.Event().wait()

        def kill(self) -> None:
            self.killed = True

    actor_factory, engine = ActorFactory(config(0.01), "cpu", (), Factories(), print), Engine()

    async def teacher(name: str, index: int) -> TeacherProxy:
        remote: Any = engine
        return TeacherProxy(remote)

    actor_factory.teacher = teacher  # type: ignore[method-assign]
    with pytest.raises(EngineStartError, match=r"teacher t/0: did not go to sleep within 0\.01 s"):
        await asyncio.wait_for(actor_factory._start_asleep("t", 0), 5)
    assert (engine.killed, actor_factory.colocated) == (True, {})


class ProcessMadeError(Exception):
    pass


def made_environments(actor_factory: ActorFactory) -> list[dict[str, str]]:
    """The environments of processes; none of them is started."""
    made: list[dict[str, str]] = []

    async def create(actor: ActorName, *, env: dict[str, str], **_: Any) -> Remote:
        made.append(env)
        raise ProcessMadeError

    actor_factory.create = create  # type: ignore[method-assign, assignment]
    return made


async def test_an_engine_knows_how_long_its_start_may_take_and_a_rank_keeps_its_heap() -> None:
    actor_factory = ActorFactory(config(1800), "cuda", (), Factories(), print)
    made = made_environments(actor_factory)
    with pytest.raises(ProcessMadeError):
        await actor_factory._start(student(0), "m:f", (), gpus=1, bundle=("rollout", 0))
    with pytest.raises(ProcessMadeError):
        await TrainerActor.start(actor_factory, None)
    assert made[0]["VLLM_ENGINE_READY_TIMEOUT_S"] == "1800"
    assert [KEEPS in env for env in made] == [False, True]


def hosts_on(monkeypatch: pytest.MonkeyPatch, node: str, **gpus: str) -> None:
    """The GPUs of all hosts are on the node; each host has that of its index, or some ``gpus``."""

    async def place_of(name: str, actor: str, *asked: Any) -> ActorPlacement:
        index = actor.rpartition("/")[2]
        return ActorPlacement(node, tuple(gpus.get(f"_{index}", index).split(",")))

    monkeypatch.setattr(Remote, "place_of", place_of)


@pytest.mark.parametrize("node", ["a", "b"])
async def test_a_guest_is_built_on_its_hosts_node_only(
    monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """Elsewhere its variable CUDA_VISIBLE_DEVICES would name GPUs that others have there."""
    actor_factory = ActorFactory(config(5), "cuda", (), Factories(), print)
    handle: Any = FakeHandle(node)

    async def create(*args: Any, place: ActorPlacement, **named: Any) -> Remote:
        made = Remote("teacher t/0", handle, 5)
        made.shared_place = place
        actor_factory.started.append(made)
        return made

    monkeypatch.setattr(actor_factory, "create", create)
    monkeypatch.setattr(actor_factory, "_beside", lambda pool: 0)
    monkeypatch.setattr(Remote, "kill", lambda self: None)
    hosts_on(monkeypatch, "a")
    if node == "a":
        await actor_factory.teacher("t", 0)
    else:
        words = "GPU – of node b, but its host had GPU 0 of node a"
        with pytest.raises(Displaced, match=words):
            await actor_factory.teacher("t", 0)
    assert handle.built == (node == "a")


def with_train(start_s: float, teacher: dict[str, Any] | None = None) -> RunConfig:
    """Two engines of the student, each on the GPUs of two of the trainer's four ranks."""
    rollout = {"placement": "colocated", "with": "train", "replicas": 2, "tensor_parallel": 2}
    teachers = {"t": teacher or {"model": "t"}}
    return config(start_s, teachers=teachers, train={"ranks": 4}, rollout=rollout)


@pytest.mark.parametrize("teacher", [False, True], ids=["alone", "with a teacher"])
async def test_the_trainers_ranks_are_built_when_the_engines_on_their_gpus_sleep(
    teacher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = GUEST | {"tensor_parallel": 4} if teacher else None
    made = ActorFactory(with_train(5, guest), "cuda", (), Factories(), print)
    events: list[str] = []
    hosts_on(monkeypatch, "a")

    class Student:
        def __init__(self, name: str) -> None:
            self.name = name

        async def sleep(self) -> None:
            events.append(f"{self.name} sleeps")

    async def create(actor: ActorName, **named: Any) -> Remote:
        handle: Any = FakeHandle("a", str(named["bundle"][1]))
        return Remote(actor.name, handle, 5)

    async def start(index: int, queue: Any, incarnation: int = 0) -> Any:
        bundle = made._bundle("rollout", index)
        place = await made._shared_place("rollout", bundle[1])
        assert (place, queue) == (
            ActorPlacement("a", (str(2 * index), str(2 * index + 1))),
            "queue",
        )
        return Student(f"student/{index}")

    async def start_teacher(name: str, index: int) -> Any:
        first = made._bundle(f"teachers.{name}", index)[1]
        place = await made._shared_place(f"teachers.{name}", first)
        assert place == ActorPlacement("a", ("0", "1", "2", "3"))
        return Student(f"teacher {name}/{index}")

    async def build(trainer: Any) -> None:
        events.append("trainer")

    monkeypatch.setattr(made, "create", create)
    monkeypatch.setattr(made, "student", start)
    monkeypatch.setattr(made, "teacher", start_teacher)
    monkeypatch.setattr("async_opd.cluster.singleton_actors.TrainerActor.build", build)
    queue: Any = "queue"
    await asyncio.wait_for(TrainerActor.start(made, queue), 5)
    assert sorted(events[:2]) == ["student/0 sleeps", "student/1 sleeps"]
    assert events[2:] == (["teacher t/0 sleeps"] if teacher else []) + ["trainer"]
    assert made.colocated["rollout"].keys() == {0, 1}


async def test_a_student_on_the_trainers_gpus_reserves_none_and_sees_those_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ActorFactory(with_train(5), "cuda", (), Factories(), print)
    hosts_on(monkeypatch, "a")
    asked: list[Any] = []

    async def create(actor: ActorName, **named: Any) -> Remote:
        asked.append((named["gpus"], named["bundle"], named["place"].gpus))
        handle: Any = FakeHandle("a")
        return Remote(actor.name, handle, 5)

    monkeypatch.setattr(made, "create", create)
    monkeypatch.setattr(made, "_beside", lambda pool: 0)
    queue: Any = None
    await made.student(1, queue)
    assert asked == [(0, ("train", 2), ("2", "3"))]


class Together:
    """A cluster of four hosts of one GPU each on one node; ``events`` in their order."""

    def __init__(self, **spans: int) -> None:
        self.events: list[str] = []
        self.broken = ""
        teachers = {
            name: GUEST | {"tensor_parallel": span, "replicas": 4 // span}
            for name, span in spans.items()
        }
        given = config(5, teachers=teachers)
        self.factory = ActorFactory(given, "cuda", (), Factories(), print)
        self.factory._start_asleep = self.start_asleep  # type: ignore[method-assign]

    async def start_asleep(self, pool: str, index: int, queue: Any) -> None:
        name = pool.removeprefix("teachers.")
        place = await self.factory._shared_place(pool, self.factory._bundle(pool, index)[1])
        assert place is not None
        self.events.append(f"{name}/{index} on {', '.join(place.gpus)}")
        if name == self.broken:
            raise EngineStartError(f"teacher {name}/{index}", "no memory")
        await settle(5)
        self.events.append(f"{name}/{index} sleeps")
        self.factory.colocated.setdefault(pool, {})[index] = SimpleNamespace()  # type: ignore[assignment]

    async def host(self, index: int) -> None:
        async def build() -> None:
            self.events.append(f"host {index}")

        await self.factory.build_after_guests("rollout", [index], build)

    async def launch(self, *hosts: int) -> None:
        works = (self.host(index) for index in hosts)
        await asyncio.wait_for(asyncio.gather(*works), 5)


async def test_a_teacher_on_two_hosts_gpus_starts_when_both_have_come_and_before_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts_on(monkeypatch, "a")
    made = Together(t=2)
    first = asyncio.create_task(made.host(0))
    await asyncio.sleep(0.01)
    assert made.events == []
    await made.launch(1)
    await first
    assert made.events[:2] == ["t/0 on 0, 1", "t/0 sleeps"]
    assert sorted(made.events[2:]) == ["host 0", "host 1"]
    await made.launch(1)  # restarted: it waits for no other host
    assert made.events[4:] == ["host 1"]
    small = Together(t=1)  # than its host: it gets the first of its GPUs
    hosts_on(monkeypatch, "a", _0="4,5")
    assert await small.factory._shared_place("teachers.t", 0) == ActorPlacement("a", ("4",))


async def test_teachers_of_all_sizes_start_one_after_the_other_on_every_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts_on(monkeypatch, "a")
    made = Together(one=1, two=2, three=3, four=4)
    await made.launch(2, 0, 3, 1)
    awake: set[str] = set()
    for event in made.events:
        name, _, rest = event.partition(" ")
        gpus = set(rest.removeprefix("on ").split(", ")) if rest.startswith("on") else set()
        assert not awake & gpus, made.events
        awake |= gpus
        if rest == "sleeps":
            (started,) = (e for e in made.events if e.startswith(f"{name} on"))
            awake -= set(started.partition(" on ")[2].split(", "))
    assert {event for event in made.events if " on " in event} >= {
        "two/1 on 2, 3",
        "three/0 on 0, 1, 2",
        "four/0 on 0, 1, 2, 3",
    }


async def test_a_teacher_that_does_not_start_is_the_error_of_all_of_its_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts_on(monkeypatch, "a")
    made = Together(t=2)
    made.broken = "t"
    works = [asyncio.create_task(made.host(index)) for index in range(2)]
    await asyncio.wait_for(asyncio.wait(works), 5)
    assert [str(work.exception()) for work in works] == ["teacher t/0: no memory"] * 2


async def started_queue(factory: ActorFactory) -> Any:
    return FakeProcess("queue")


async def test_guests_are_in_the_order_of_their_indices_whichever_sleeps_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A teacher's member 0 would have process t/1, and a rebuild of it would take t/0's name."""
    made = ActorFactory(
        config(5, teachers={"t": GUEST | {"replicas": 2}}), "cpu", (), Factories(), print
    )
    seen: list[list[str]] = []

    async def actor(*args: Any, **named: Any) -> Any:
        return SimpleNamespace(remote=None)

    async def student(index: int, queue: Any) -> None:
        made.colocated["teachers.t"] = {1: "t/1", 0: "t/0"}  # type: ignore[dict-item]

    async def scorer(
        factory: ActorFactory, remote: Any, teachers: dict[str, list[Any]], queue: Any
    ) -> Any:
        seen.append(teachers["t"])
        raise ProcessMadeError

    monkeypatch.setattr(made, "student", student)
    monkeypatch.setattr(made, "create", actor)
    for started, fake in (
        (QueueActor, started_queue),
        (TrainerActor, actor),
        (ScorerActor, scorer),
    ):
        monkeypatch.setattr(started, "start", fake)
    with pytest.raises(ProcessMadeError):
        await _build(made, ClusterWatch(print))
    assert seen == [["t/0", "t/1"]]


@dataclass(frozen=True)
class OneUnit(GpuBundles):
    """The unit of a student and its guest, which is ``there`` as long as a test says so."""

    units: tuple[Unit, ...] = (Unit((Bundle("rollout", 0, 1),)),)
    there: list[bool] = field(default_factory=list)

    async def strategy(self, name: str, pool: str = RANKS, index: int = 0) -> None:
        if not self.there:
            await asyncio.Event().wait()

    def asked(self, of: Collection[Unit] | None = None) -> dict[Unit, str | None]:
        return dict.fromkeys(of or (), "a" if self.there else None)

    async def placed(self) -> None:
        self.there.append(True)


async def test_a_guest_whose_place_is_lost_before_its_turn_is_left_out_of_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its hosts would wait for it without end: the turn has no bound."""
    bundles, places = OneUnit(there=[True]), FakePlaces()
    rebuild = _RebuildTeacher(
        ActorFactory(config(5), "cuda", (), Factories(), print, bundles=bundles)
    )
    monkeypatch.setattr(rebuild.actor_factory, "_beside", lambda pool: 0)
    monkeypatch.setattr(rebuild, "places", lambda teacher: places)
    slots = ReplicaSlots("t", [None], HealthConfig(), rebuild, asleep=True)
    running = asyncio.create_task(slots.members.run())
    places.give(0)
    await settle()
    assert [one.state for one in slots.members.all] == [State.REBUILDING]  # it waits for its turn
    places.there.clear()
    bundles.there.clear()
    await slots.wake()
    await asyncio.wait_for(slots.sleep(), 2)
    assert [one.state for one in slots.members.all] == [State.ABSENT]
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize("there", [True, False])
async def test_an_error_of_a_guests_start_is_not_its_own_if_its_place_is_lost(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = OneUnit(there=[True])
    actor_factory = ActorFactory(config(5), "cuda", (), Factories(), print, bundles=bundles)
    monkeypatch.setattr(actor_factory, "_beside", lambda pool: 0)

    async def place_of(*asked: Any) -> ActorPlacement:
        if not there:
            bundles.there.clear()
        raise StageError("student/0", "its placement group was removed")

    monkeypatch.setattr(Remote, "place_of", place_of)
    with pytest.raises(StageError) as error:
        await actor_factory.teacher("t", 0)
    assert isinstance(error.value, Displaced) == (not there)


DISPLACED = Displaced("student/0", "gpu-b is lost")


class Starting:
    """A start whose parts fail with these errors, one a try; a process of it may lose its machine.

    ``lost`` is the error of that process, as Ray's head gives it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *errors: StageError, lost: Displaced | None = None
    ) -> None:
        self.errors, self.tries = list(errors), 0
        self.lines: list[str] = []
        self.ended: list[int] = []
        given = config(5, supervision={"max_restarts": 2})
        self.factory = ActorFactory(given, "cuda", (), Factories(), self.lines.append)
        self.lost = lost
        monkeypatch.setattr(QueueActor, "start", self.queue)

    async def queue(self, factory: ActorFactory) -> Any:
        number = self.tries
        self.tries += 1
        process: Any = FakeProcess(f"queue/{number}")
        process.displacement = self.lost
        process.kill = lambda: self.ended.append(number)
        self.factory.started.append(process)
        raise self.errors.pop(0) if self.errors else ProcessMadeError

    async def ends(self) -> None:
        await asyncio.wait_for(_started(self.factory, ClusterWatch(print)), 5)


@pytest.mark.parametrize("lost", [None, DISPLACED], ids=["its own error", "that of another part"])
async def test_a_start_in_which_a_machine_is_lost_begins_again_with_no_process_of_the_first(
    lost: Displaced | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DISPLACED if lost is None else StageError("rollouter", "its process died")
    made = Starting(monkeypatch, error, lost=lost)
    with pytest.raises(ProcessMadeError):
        await made.ends()
    assert (made.tries, made.ended, len(made.factory.started)) == (2, [0], 1)
    first = "cluster: the start begins again: student/0: gpu-b is lost"
    its = "" if lost is None else " (rollouter: its process died)"
    assert made.lines[0] == first + its


async def test_a_start_begins_again_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Starting(monkeypatch, *[DISPLACED] * 5)
    with pytest.raises(Displaced):
        await made.ends()
    assert made.tries == 3


async def test_a_start_begins_again_once_the_trainer_has_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes beside it, and those of its sync group, would wait for its next place."""
    made = Starting(monkeypatch)
    bundles = OneUnit(units=(Unit((Bundle("train", 0, 1),)),), there=[True])
    made.factory.bundles = bundles
    hung: list[bool] = []

    async def queue(factory: ActorFactory) -> Any:
        if hung:
            raise ProcessMadeError
        hung.append(True)
        bundles.there.clear()
        await asyncio.Event().wait()

    monkeypatch.setattr(QueueActor, "start", queue)
    monkeypatch.setattr(gpu_bundles, "POLL_S", 0.001)
    with pytest.raises(ProcessMadeError):
        await made.ends()
    lost = "trainer: its place in the cluster is lost"
    assert made.lines[0] == f"cluster: the start begins again: {lost}"


async def test_an_engine_that_is_left_out_of_a_start_is_not_the_cause_of_another_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ActorFactory(config(5), "cpu", (), Factories(), print)
    process: Any = FakeProcess("teacher/t/0")
    process.displacement = DISPLACED

    async def create(*args: Any, **named: Any) -> Any:
        made.started.append(process)
        return process

    async def build(*args: Any) -> None:
        raise DISPLACED

    process.build = build
    monkeypatch.setattr(made, "create", create)
    with pytest.raises(Displaced):
        await made.teacher("t", 0)
    assert await made.displaced() is None


async def test_the_end_of_a_start_kills_stages_before_engines_are_shut_down() -> None:
    made = ActorFactory(config(5), "cpu", (), Factories(), print)
    events: list[str] = []

    def process(name: str) -> Any:
        async def call(method: str, timeout_s: float) -> None:
            events.append(f"{method} of {name}")

        return SimpleNamespace(call=call, kill=lambda: events.append(f"kill of {name}"))

    engine, stage = process("student/0"), process("scorer")
    made.started, made.engines, made.stages = [engine, stage], [engine], [stage]
    await made.end()
    assert events[:2] == ["kill of scorer", "shutdown of student/0"]
    assert (made.started, made.engines, made.stages) == ([], [], [])


async def test_a_start_that_fails_on_machines_that_live_does_not_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Starting(monkeypatch, EngineStartError("student/0", "no such model"))
    with pytest.raises(EngineStartError, match="no such model"):
        await made.ends()
    assert (made.tries, made.lines) == (1, [])


@dataclass(frozen=True)
class Reserved(GpuBundles):
    """All units of a config, on GPUs that nothing asks for."""

    async def strategy(self, name: str, pool: str = RANKS, index: int = 0) -> None:
        """Any place."""


@pytest.mark.parametrize("shares", [False, True], ids=["dedicated", "shared"])
async def test_an_engine_whose_machine_is_lost_is_started_later_unless_others_wait_for_it(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(5, rollout={"replicas": 2}, teachers={"t": GUEST if shares else {"model": "t"}})
    bundles = Reserved("run", tuple(units(pools(given))))
    made = ActorFactory(given, "cuda", (), Factories(), print, bundles=bundles)
    seen: list[Any] = []

    async def actor(*args: Any, **named: Any) -> Any:
        return SimpleNamespace(remote=None)

    async def student(index: int, queue: Any) -> str:
        if index:
            raise DISPLACED
        return "student/0"

    async def start(*given: Any) -> Any:
        seen.extend(given[2])
        raise ProcessMadeError

    monkeypatch.setattr(made, "student", student)
    for name in ("create", "teacher"):
        monkeypatch.setattr(made, name, actor)
    for started in (QueueActor, TrainerActor, ScorerActor):
        monkeypatch.setattr(started, "start", started_queue if started is QueueActor else actor)
    monkeypatch.setattr("async_opd.cluster.launch.RollouterActor.start", start)
    with pytest.raises(Displaced if shares else ProcessMadeError):
        await _build(made, ClusterWatch(print))
    assert seen == ([] if shares else ["student/0", None])
