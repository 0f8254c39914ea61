"""What a student replica does while it sleeps, and what it reports to wait for, on a fake."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.observability.activity import Activity
from async_opd.waiting.gate import Gate
from tests.rollouter.test_stage import settle

pytestmark = pytest.mark.slow  # imports vLLM


class Engine:
    """Records its calls; waking up takes until ``woken``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.woken = asyncio.Event()

    async def check_health(self) -> None: ...

    async def pause_generation(self, **_: object) -> None: ...

    async def sleep(self, **_: object) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        self.calls.append("wake up")
        await self.woken.wait()


class Watch:
    """An ExitWatch that sees no process."""

    async def within(self, work: Any) -> Any:
        return await work


def replica(engine: Engine) -> Any:
    """A replica without the processes of a real engine."""
    from rollouter.replica import StudentReplica

    made: Any = object.__new__(StudentReplica)
    made._engine, made._gate = engine, Gate()
    made._spec = type("Spec", (), {"kwargs": {}})
    made._activity, made._exit_watch = Activity("the engine"), Watch()
    made._unpaused, made._syncing = asyncio.Event(), asyncio.Event()
    made._unpaused.set()
    made._counters, made._mixed, made._version = {}, "", 1
    made._worker, made._slots = SimpleNamespace(rollouts=0, grading=0), SimpleNamespace(limit=4)
    return made


async def waits_for(student: Any) -> str:
    """What the replica's report says."""
    said: str = (await student.report()).waits_for
    return said


@pytest.mark.parametrize("ends_while_waking", [True, False])
async def test_an_engine_that_was_woken_while_it_drained_does_not_sleep_behind_an_open_gate(
    ends_while_waking: bool,
) -> None:
    engine = Engine()
    student = replica(engine)
    await student._gate.__aenter__()
    sleeping = asyncio.create_task(student.sleep())
    await settle()
    waking = asyncio.create_task(student.wake())
    await settle()
    if not ends_while_waking:
        engine.woken.set()
        await waking
    await student._gate.__aexit__()
    await sleeping
    engine.woken.set()
    await waking
    assert (engine.calls, student._gate._open.is_set()) == (["wake up"], True)


async def test_an_engine_sleeps_when_its_requests_are_finished() -> None:
    engine = Engine()
    student = replica(engine)
    await student._gate.__aenter__()
    sleeping = asyncio.create_task(student.sleep())
    await settle()
    assert engine.calls == []
    await student._gate.__aexit__()
    await sleeping
    assert (engine.calls, student._gate._open.is_set()) == (["sleep"], False)


async def test_an_idle_replica_waits_for_prompts() -> None:
    student = replica(Engine())
    assert await waits_for(student) == "prompts (admission)"
    with student._activity.busy():
        assert await waits_for(student) == ""


async def test_a_replica_that_sleeps_waits_for_its_gpu() -> None:
    student = replica(Engine())
    await student.sleep()
    assert await waits_for(student) == "its GPU, which others use"


async def test_a_paused_replica_waits_for_the_newest_weights() -> None:
    student = replica(Engine())
    await student.pause("keep")
    assert await waits_for(student) == "the newest weights"


async def test_with_weights_of_two_versions_a_replica_waits_for_weights_whatever_is_in_flight() -> (
    None
):
    student = replica(Engine())
    await student.pause("keep")
    student._mixed = "some weights were replaced"
    with student._activity.busy():
        assert await waits_for(student) == "the newest weights"
