"""Waits that end when the timer says so, the first of several works, and a gate."""

from __future__ import annotations

import ast
import asyncio
import gc
import math
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from async_opd.core.errors import StageTimeout
from async_opd.waiting.deadline import LATE_S, Bound, Deadline, Gate, gather_or_cancel, race
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


SHORT_S = 0.1
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

    with pytest.raises(StageTimeout, match=r"an answer took longer than 0\.1 s"):
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


async def test_closing_waits_for_what_is_inside_and_lets_nothing_in() -> None:
    gate, seen, go = Gate(), [], asyncio.Event()

    async def work(name: str) -> None:
        async with gate:
            seen.append(name)
            await go.wait()

    first = asyncio.create_task(work("first"))
    await settle()
    closing = asyncio.create_task(gate.close())
    second = asyncio.create_task(work("second"))
    await settle()
    assert (seen, closing.done()) == (["first"], False)
    go.set()
    await closing
    await settle()
    assert seen == ["first"]
    gate.open()
    await asyncio.gather(first, second)
    assert seen == ["first", "second"]


async def test_a_gate_that_closes_again_before_a_waiter_ran_keeps_it_out() -> None:
    gate = Gate()
    await gate.close()
    waiting = asyncio.create_task(gate.__aenter__())
    await settle()
    gate.open()
    await gate.close()
    await settle()
    assert not waiting.done()
    gate.open()
    await waiting


async def test_closing_says_whether_the_gate_was_opened_before_it_was_empty() -> None:
    gate = Gate()
    await gate.__aenter__()
    closing = asyncio.create_task(gate.close())
    await settle()
    gate.open()
    again = asyncio.create_task(gate.close())
    await settle()
    await gate.__aexit__()
    assert (await closing, await again) == (False, True)


async def value(number: int, turns: int = 0) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return number


async def fail(turns: int = 0) -> int:
    await value(0, turns)
    raise ValueError("bad")


class Endless:
    """Work that ends only when it is cancelled, after a few turns of the event loop."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended = False

    async def __call__(self) -> int:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            try:
                await value(0, 3)
            finally:
                self.ended = True
            if self.error is not None:
                raise self.error


async def test_the_first_result_is_the_result_wherever_it_stands() -> None:
    assert await race(value(1), value(2, turns=5)) == 1
    assert await race(value(1, turns=5), value(2)) == 2
    assert await race(value(1), value(2)) == 1  # at once: the first given
    assert await race(value(1), fail()) == 1
    task, loser = asyncio.create_task(value(7)), Endless()
    assert await race(task, loser()) == task.result() == 7
    assert loser.ended
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("of", [race, gather_or_cancel])
async def test_an_error_that_is_first_is_raised_and_ends_the_others(of: Any) -> None:
    loser = Endless()
    with pytest.raises(ValueError, match="bad"):
        await of(loser(), fail(1))
    assert loser.ended


async def test_an_error_of_the_loser_is_dropped_without_a_complaint_of_the_loop() -> None:
    gc.freeze()  # the collection below is of this test's objects only
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    assert await race(value(1, turns=1), Endless(OSError("late"))()) == 1
    assert await race(value(1), fail()) == 1
    gc.collect()
    assert complaints == []


async def test_a_race_that_is_cancelled_leaves_no_task_behind() -> None:
    works = Endless(), Endless()
    racing = asyncio.create_task(race(*(work() for work in works)))
    await value(0, 3)
    racing.cancel()
    await value(0, 2)
    racing.cancel()  # while it waits for the works to end
    with pytest.raises(asyncio.CancelledError):
        await racing
    assert all(work.ended for work in works)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_gathered_results_are_in_the_order_of_the_works() -> None:
    assert await gather_or_cancel(value(1, 3), value(2)) == [1, 2]


def test_no_gather_of_the_library_leaves_works_behind_that_go_on_after_an_error() -> None:
    root = Path(__file__).parents[2]
    found = [
        f"{file.relative_to(root)}:{node.lineno}"
        for room in ("async_opd", "rollouter", "teachers", "trainer")
        for file in (root / room).rglob("*.py")
        if "asyncio.gather" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.gather"
        if not any(keyword.arg == "return_exceptions" for keyword in node.keywords)
    ]
    assert found == [], "use async_opd.waiting.deadline.gather_or_cancel"
