"""What is built while teachers may have the GPUs, on made-up processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.cluster.actor_factory import ActorFactory, Factories
from async_opd.cluster.launch import _rebuilding, _RebuildStudent
from async_opd.cluster.proxies import TeacherProxy
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import EngineStartError
from async_opd.processes.members import Member


class Student:
    """It is also the boxes, and the weight sync."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def kill(self) -> None:
        self.events.append("kill")

    async def student(self, index: int, queue: Any, life: int) -> Any:
        self.events.append(f"build life {life}")
        return self

    async def ready(self) -> int:
        return 1

    async def rejoin(self, index: int, student: Any, workers: int) -> None:
        self.events.append("rejoin")


def config(host: str = "") -> RunConfig:
    """Of a run whose teacher shares the GPUs of the pool ``host``."""
    colocated = {"placement": "colocated", "with": host} if host else {}
    return RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {"t": {"model": "t", **colocated}},
            "data": {"train": "prompts.jsonl"},
        }
    )


@pytest.mark.parametrize("host", ["", "rollout"])
async def test_students_that_are_built_again_do_not_wait_for_each_other(host: str) -> None:
    made: Any = Student()
    meeting = asyncio.Barrier(3)

    async def ready() -> int:
        await meeting.wait()
        return 1

    made.ready = ready
    gpus = asyncio.Lock()
    rebuild = _RebuildStudent(made, made, _rebuilding(config(host), gpus), made)
    async with asyncio.timeout(5):
        await asyncio.gather(*(rebuild(Member(i, f"student/{i}", made)) for i in range(3)))
    assert made.events.count("rejoin") == 3
    assert not gpus.locked()


@pytest.mark.parametrize("host", ["", "train"])
async def test_no_shift_is_waited_for_where_no_teacher_has_the_students_gpus(host: str) -> None:
    made: Any = Student()
    gpus = asyncio.Lock()
    await gpus.acquire()
    rebuild = _RebuildStudent(made, made, _rebuilding(config(host), gpus), made)
    await asyncio.wait_for(rebuild(Member(0, "student/0", made)), 5)
    assert made.events[-1] == "rejoin"


async def test_a_student_that_is_built_again_keeps_a_shift_out_while_another_is_given_up() -> None:
    made: Any = Student()
    begun, gpus = asyncio.Semaphore(0), asyncio.Lock()

    async def ready() -> int:
        begun.release()
        await asyncio.Event().wait()
        return 1

    made.ready = ready
    rebuild = _RebuildStudent(made, made, _rebuilding(config("rollout"), gpus), made)
    members = [Member[Any](index, f"student/{index}", made) for index in range(2)]
    first, second = (asyncio.ensure_future(rebuild(member)) for member in members)
    for _ in members:
        await asyncio.wait_for(begun.acquire(), 5)
    first.cancel()
    await asyncio.wait({first})
    assert gpus.locked()
    second.cancel()
    await asyncio.wait({second})
    assert not gpus.locked()


async def test_a_student_that_is_built_again_waits_until_no_teacher_has_its_gpu() -> None:
    made: Any = Student()
    gpus = asyncio.Lock()
    held = _rebuilding(config("rollout"), gpus)
    rebuild = _RebuildStudent(made, made, held, made)
    await gpus.acquire()  # a shift
    work = asyncio.create_task(rebuild(Member(0, "student/0", made)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert made.events == ["kill"]
    gpus.release()
    await asyncio.wait_for(work, 5)
    assert made.events == ["kill", "build life 1", "rejoin"]


async def test_no_turn_begins_before_the_student_has_joined() -> None:
    made: Any = Student()
    gpus = asyncio.Lock()
    joined: list[bool] = []

    async def rejoin(index: int, student: Any, workers: int) -> None:
        joined.append(gpus.locked())

    made.rejoin = rejoin
    held = _rebuilding(config("rollout"), gpus)
    await _RebuildStudent(made, made, held, made)(Member(0, "student/0", made))
    assert (joined, gpus.locked()) == ([True], False)


async def test_a_guest_that_does_not_go_to_sleep_is_ended_and_named() -> None:
    class Engine:
        name = "teacher t/0"
        killed = False

        async def call(self, *args: Any, timeout_s: float) -> None:
            await asyncio.Event().wait()

        def kill(self) -> None:
            self.killed = True

    config = RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {"t": {"model": "t", "placement": "colocated", "with": "rollout"}},
            "data": {"train": "prompts.jsonl"},
            "timeouts": {"engine_start_s": 0.01},
        }
    )
    actor_factory, engine = ActorFactory(config, "cpu", (), Factories(), print), Engine()

    async def teacher(name: str, index: int) -> TeacherProxy:
        remote: Any = engine
        return TeacherProxy(remote)

    actor_factory.teacher = teacher  # type: ignore[method-assign]
    with pytest.raises(EngineStartError, match=r"teacher t/0: did not go to sleep within 0\.01 s"):
        await asyncio.wait_for(actor_factory._start_asleep("t", 0), 5)
    assert (engine.killed, actor_factory.colocated) == (True, {})
