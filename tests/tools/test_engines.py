"""The engines that a tool starts: how long it waits for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from async_opd.cluster import launch
from async_opd.core.errors import StageTimeout
from async_opd.core.reports import Progress
from async_opd.tools.engines import ToolEngines
from tests.world.config import run_config


class Hangs:
    """Engines that compute no token."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def progress(self) -> Progress:
        return Progress(0)


async def test_engines_that_compute_no_token_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def started(*_: Any, **__: Any) -> AsyncIterator[Hangs]:
        yield Hangs()

    monkeypatch.setattr(launch, "launch_evaluators", started)
    config = run_config(timeouts={"stall_s": 0.1})
    asking = ToolEngines("cpu", (), print).of_student(config, "probe", lambda one: one.run(), 1)
    with pytest.raises(StageTimeout, match=r"probe: .* no new token for 0\.1 s"):
        await asyncio.wait_for(asking, 10)
