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


class Timer:
    """One entry that rings by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cancelled = False
        self.ring: Callable[[], None] = lambda: None

    def __call__(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.seconds, self.ring = seconds, call
        return self

    def cancel(self) -> None:
        self.cancelled = True


async def forever() -> None:
    await asyncio.Event().wait()


async def answer() -> int:
    return 42


async def test_work_in_time_gives_its_result_and_stops_the_timer() -> None:
    timer = Timer()
    assert await Deadline("a", timer).within(5, "work", answer()) == 42
    assert timer.cancelled


async def test_late_work_is_cancelled_and_named() -> None:
    timer = Timer()
    waiting = asyncio.create_task(Deadline("teacher t", timer).within(5, "score on /0", forever()))
    await asyncio.sleep(0)
    timer.ring()
    with pytest.raises(StageTimeout, match="teacher t: score on /0 took longer than 5 s"):
        await asyncio.wait_for(waiting, 5)


async def test_late_work_has_ended_when_the_error_is_raised_which_has_the_remedy() -> None:
    timer, ended = Timer(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.set()

    work = Deadline("a", timer).within(5, "work", slow_to_end(), "raise the bound")
    waiting = asyncio.create_task(work)
    await asyncio.sleep(0)
    timer.ring()
    with pytest.raises(StageTimeout) as caught:
        await asyncio.wait_for(waiting, 5)
    assert ended.is_set()
    assert caught.value.remedy == "raise the bound"


async def test_a_bound_inside_of_the_work_comes_through_as_it_is() -> None:
    async def inner() -> None:
        raise TimeoutError("inner")

    with pytest.raises(TimeoutError, match=r"^inner$"):
        await Deadline("a", Timer()).within(5, "work", inner())


async def test_an_infinite_bound_sets_no_timer() -> None:
    timer = Timer()
    assert await Deadline("a", timer).within(math.inf, "work", answer()) == 42
    assert timer.seconds == 0


async def test_an_error_of_the_work_comes_through() -> None:
    async def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await Deadline("a", Timer()).within(5, "work", fail())


async def test_a_cancelled_call_leaves_no_work_behind() -> None:
    waiting = asyncio.create_task(Deadline("a", Timer()).within(5, "work", forever()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


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
        for _ in range(self.turns):
            await asyncio.sleep(0)
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


async def test_a_pause_ends_when_the_timer_rings() -> None:
    timer = Timer()
    pausing = asyncio.create_task(Deadline("a", timer).pause(3))
    await asyncio.sleep(0)
    assert (timer.seconds, pausing.done()) == (3, False)
    timer.ring()
    await asyncio.wait_for(pausing, 5)


async def test_no_time_is_no_pause() -> None:
    timer = Timer()
    await asyncio.wait_for(Deadline("a", timer).pause(0), 5)
    assert timer.seconds == 0


async def test_a_pause_that_is_cancelled_leaves_no_timer() -> None:
    timer = Timer()
    pausing = asyncio.create_task(Deadline("a", timer).pause(450))
    await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert timer.cancelled
