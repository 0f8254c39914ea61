"""What is built while teachers may have the GPUs, on made-up processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.cluster.boxes import Boxes, Factories
from async_opd.cluster.launch import _RebuildStudent
from async_opd.cluster.proxies import TeacherProxy
from async_opd.core.config import RunConfig
from async_opd.core.errors import EngineStartError


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


async def test_a_student_that_is_built_again_waits_until_no_teacher_has_its_gpu() -> None:
    made: Any = Student()
    gpus = asyncio.Lock()
    rebuild = _RebuildStudent(made, made, made, ["student/0"], gpus)
    await gpus.acquire()  # a shift
    work = asyncio.create_task(rebuild("student/0", made))
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
    await _RebuildStudent(made, made, made, ["student/0"], gpus)("student/0", made)
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
    boxes, engine = Boxes(config, "cpu", (), Factories(), print), Engine()

    async def teacher(name: str, index: int) -> TeacherProxy:
        remote: Any = engine
        return TeacherProxy(remote)

    boxes.teacher = teacher  # type: ignore[method-assign]
    with pytest.raises(EngineStartError, match=r"teacher t/0: did not go to sleep within 0\.01 s"):
        await asyncio.wait_for(boxes._guest("t", 0), 5)
    assert (engine.killed, boxes.seated) == (True, {})
