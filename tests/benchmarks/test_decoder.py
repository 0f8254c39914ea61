"""The simulated decoding engine against arithmetic."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import pytest

from async_opd.config.sections.plan import RolloutPlan
from async_opd.core.samples import VersionSpan
from benchmarks.simulated.decoder import Decoder


class Time:
    """A clock and timers that are moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None], list[bool]]] = []

    def clock(self) -> float:
        return self.now

    def timer(self, delay: float, call: Callable[[], None]) -> Any:
        alive = [True]
        heapq.heappush(self._due, (self.now + delay, len(self._due), call, alive))

        class Handle:
            def cancel(self) -> None:
                alive[0] = False

        return Handle()

    async def until(self, moment: float) -> None:
        while self._due and self._due[0][0] <= moment:
            self.now, _, call, alive = heapq.heappop(self._due)
            if alive[0]:
                call()
            for _ in range(5):
                await asyncio.sleep(0)
        self.now = moment


def decoder(time: Time, step_s: float = 1.0, per: float = 0.0) -> Decoder:
    return Decoder(RolloutPlan(step_s=step_s, step_s_per_request=per), time.clock, time.timer)


async def begun(engine: Decoder, length: int) -> asyncio.Task[tuple[VersionSpan, ...]]:
    task = asyncio.create_task(engine.decode(length))
    await asyncio.sleep(0)
    return task


async def test_a_request_alone_takes_its_length_times_a_step() -> None:
    time = Time()
    task = await begun(decoder(time, step_s=2.0), 5)
    await time.until(9.9)
    assert not task.done()
    await time.until(10.1)
    assert task.done()


async def test_two_requests_slow_each_other_down() -> None:
    time = Time()
    engine = decoder(time, step_s=1.0, per=0.5)  # alone 1.5 s a token, together 2 s
    long, short = await begun(engine, 10), await begun(engine, 4)
    await time.until(8.1)
    assert short.done()
    await time.until(8 + 6 * 1.5 - 0.1)
    assert not long.done()
    await time.until(8 + 6 * 1.5 + 0.1)
    assert long.done()


async def test_a_pause_takes_no_tokens() -> None:
    time = Time()
    engine = decoder(time)
    task = await begun(engine, 4)
    await time.until(2)
    engine.pause()
    await time.until(50)
    engine.resume(1)
    await time.until(51.9)
    assert not task.done()
    await time.until(52.1)
    assert task.done()


async def test_tokens_belong_to_the_version_that_decoded_them() -> None:
    time = Time()
    engine = decoder(time)
    task = await begun(engine, 6)
    await time.until(2)
    engine.pause()
    engine.resume(1)
    await time.until(10)
    assert await task == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 6))


async def test_a_request_that_starts_after_a_sync_has_one_version() -> None:
    time = Time()
    engine = decoder(time)
    engine.pause()
    engine.resume(3)
    task = await begun(engine, 2)
    await time.until(5)
    assert await task == (VersionSpan(3, 0, 2),)


@pytest.mark.parametrize("requests", [1, 3, 8])
async def test_full_slots_give_the_tokens_per_second_of_the_speed(requests: int) -> None:
    time = Time()
    speed = RolloutPlan(step_s=0.1, step_s_per_request=0.01)
    engine = Decoder(speed, time.clock, time.timer)
    tasks = [await begun(engine, 100) for _ in range(requests)]
    await time.until(100 * speed.step(requests) + 1e-3)
    assert all(task.done() for task in tasks)
