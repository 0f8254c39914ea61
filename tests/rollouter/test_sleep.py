"""The sleep of a student replica whose caller died while it waited for requests, on a fake."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.waiting.gate import Gate
from tests.rollouter.test_stage import settle

pytestmark = pytest.mark.slow  # imports vLLM


class Engine:
    """Records its calls; waking up takes until ``woken``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.woken = asyncio.Event()

    async def sleep(self, **_: object) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        self.calls.append("wake up")
        await self.woken.wait()


def replica(engine: Engine) -> Any:
    """A replica without the processes of a real engine."""
    from rollouter.replica import StudentReplica

    made: Any = object.__new__(StudentReplica)
    made._engine, made._gate = engine, Gate()
    made._spec = type("Spec", (), {"kwargs": {}})
    return made


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
