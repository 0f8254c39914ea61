"""Waits that end by themselves, when the timer says so."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from async_opd.core.errors import StageTimeout
from async_opd.waiting.deadline import LATE_S, Bound, Deadline
from tests.world.clock import ManualTimer, settle


async def forever() -> None:
    await asyncio.Event().wait()


async def answer() -> int:
    return 42


@pytest.mark.parametrize(("bound_s", "timers"), [(5, [5]), (math.inf, [])])
async def test_work_in_time_gives_its_result(bound_s: float, timers: list[float]) -> None:
    timer = ManualTimer()
    assert await Deadline("a", timer).within(bound_s, "work", answer()) == 42
    assert (timer.delays, timer.due) == (timers, [])


async def test_late_work_is_cancelled_named_and_has_ended_when_the_error_is_raised() -> None:
    timer, ended = ManualTimer(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.set()

    work = Deadline("teacher t", timer).within(5, "score on /0", slow_to_end(), "raise the bound")
    waiting = asyncio.create_task(work)
    await asyncio.sleep(0)
    timer.advance(5)
    with pytest.raises(StageTimeout, match="teacher t: score on /0 took longer than 5 s") as caught:
        await asyncio.wait_for(waiting, 5)
    assert (ended.is_set(), caught.value.remedy) == (True, "raise the bound")


@pytest.mark.parametrize("error", [TimeoutError("inner"), ValueError("bad")])
async def test_an_error_of_the_work_also_a_bound_in_it_comes_through(error: Exception) -> None:
    async def fails() -> None:
        raise error

    with pytest.raises(type(error), match=rf"^{error}$"):
        await Deadline("a", ManualTimer()).within(5, "work", fails())


SHORT_S = 0.05
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Called:
    """A call that a thread answers; the answer takes ``turns`` of the loop to its caller."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.answered = asyncio.get_running_loop().create_future()

    def answer(self) -> None:
        self.answered.get_loop().call_soon_threadsafe(self.answered.set_result, None)

    async def __call__(self) -> int:
        await self.answered
        await settle(self.turns)
        return 42


def block_for(seconds: float) -> None:
    """Holds up the running event loop."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        pass


@both_loops
@pytest.mark.parametrize("turns", [0, 1, 5])
def test_an_answer_that_came_while_the_loop_was_blocked_is_in_time(run: Run, turns: int) -> None:
    async def calls() -> list[int]:
        called = [Called(turns) for _ in range(4)]
        bounded = [Deadline("a").within(SHORT_S, "an answer", one()) for one in called]
        waiting = asyncio.gather(*bounded)
        await asyncio.sleep(0)
        for one in called:
            thread = threading.Thread(target=one.answer)
            thread.start()
            thread.join()
        block_for(3 * SHORT_S)
        return await waiting

    assert run(calls()) == [42] * 4


@both_loops
def test_work_without_an_answer_ends_however_long_the_loop_was_blocked(run: Run) -> None:
    async def call() -> None:
        waiting = asyncio.ensure_future(Deadline("a").within(SHORT_S, "an answer", forever()))
        await asyncio.sleep(0)
        block_for(3 * SHORT_S)
        await waiting

    with pytest.raises(StageTimeout, match=r"an answer took longer than 0\.05 s"):
        run(call())


async def test_a_loop_that_is_late_all_the_time_gives_work_at_most_its_bound_again() -> None:
    loop = asyncio.get_running_loop()

    def hold_up() -> None:
        block_for(2 * LATE_S)
        loop.call_soon(hold_up)

    loop.call_soon(hold_up)
    with pytest.raises(TimeoutError):
        async with Bound(SHORT_S):
            await forever()


@pytest.mark.parametrize("what", ["work", "pause"])
async def test_who_is_cancelled_leaves_no_work_and_no_timer_behind(what: str) -> None:
    timer = ManualTimer()
    made = Deadline("a", timer)
    call = made.pause(450) if what == "pause" else made.within(5, "work", forever())
    waiting = asyncio.create_task(call)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0)
    assert (waiting.cancelled(), timer.due) == (True, [])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_pause_ends_when_the_timer_rings() -> None:
    timer = ManualTimer()
    pausing = asyncio.create_task(Deadline("a", timer).pause(3))
    await asyncio.sleep(0)
    assert (timer.left, pausing.done()) == ([3], False)
    timer.advance(5)
    await asyncio.wait_for(pausing, 5)
    await asyncio.wait_for(Deadline("a", timer).pause(0), 5)
    assert timer.delays == [3]  # no time is no pause
