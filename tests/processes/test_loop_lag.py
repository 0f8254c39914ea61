"""The loop's lag against a loop that is held up."""

from __future__ import annotations

import asyncio
import time

from async_opd.processes.loop_lag import LoopLag


async def test_a_loop_that_is_held_up_is_late_by_as_much() -> None:
    lag = LoopLag(interval_s=0.01)
    time.sleep(0.3)  # noqa: ASYNC251 - this is what holds it up
    await asyncio.sleep(0.02)
    assert lag.drain() > 0.2
    lag.stop()


async def test_a_hold_up_is_reported_before_its_timer_has_fired() -> None:
    lag = LoopLag(interval_s=0.01)
    time.sleep(0.3)  # noqa: ASYNC251
    assert lag.drain() > 0.2
    lag.stop()


async def test_a_hold_up_is_reported_once() -> None:
    lag = LoopLag(interval_s=0.01)
    time.sleep(0.3)  # noqa: ASYNC251
    await asyncio.sleep(0.02)
    first = lag.drain()
    assert lag.drain() < first
    lag.stop()
