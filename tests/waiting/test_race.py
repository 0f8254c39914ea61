"""The first of several works, or their first error, ends the others."""

from __future__ import annotations

import ast
import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from async_opd.waiting.deadline import gather_or_cancel, race


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
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.gather"
        if not any(keyword.arg == "return_exceptions" for keyword in node.keywords)
    ]
    assert found == [], "use async_opd.waiting.deadline.gather_or_cancel"
