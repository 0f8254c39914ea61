"""The loop's lag against a loop that is held up."""

from __future__ import annotations

import asyncio
import time

import pytest

from async_opd.processes.loop_lag import LoopLag


@pytest.mark.parametrize("fired", [True, False], ids=["after its timer", "before it has fired"])
async def test_a_loop_that_is_held_up_is_late_by_as_much_once(fired: bool) -> None:
    lag = LoopLag(interval_s=0.01)
    time.sleep(0.3)  # noqa: ASYNC251 - this is what holds it up
    if fired:
        await asyncio.sleep(0.02)
    first = lag.drain()
    assert first > 0.2
    assert not fired or lag.drain() < first
    lag.stop()
