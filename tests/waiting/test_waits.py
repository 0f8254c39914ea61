"""One line every ten seconds names all waits, until none is left."""

from __future__ import annotations

import asyncio

from async_opd.waiting.waits import EVERY_S, MAX_NAMED, Waits
from tests.world.clock import ManualTimer


class World:
    """Waits whose time passes when a test says so, and their lines."""

    def __init__(self) -> None:
        self.timer = ManualTimer()
        self.lines: list[str] = []
        self.waits = Waits(self.lines.append, self.timer, self.timer.clock)

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(0)
        await self.timer.passes(seconds)


async def test_a_line_names_what_is_waited_for_since_when_and_its_bound() -> None:
    world = World()
    with world.waits.on("student/0 to start", 600):
        await world.advance(EVERY_S / 2)
        with world.waits.on("teacher t/0 to serve again", 60, " a try"), world.waits.on("GPUs"):
            await world.advance(EVERY_S / 2)
    assert world.lines == [
        "waiting for student/0 to start (10 s so far, at most 600 s); "
        "teacher t/0 to serve again (5 s so far, at most 60 s a try); GPUs (5 s so far, no bound)"
    ]


async def test_a_long_wait_has_a_line_every_ten_seconds_until_nothing_is_waited_for() -> None:
    world = World()
    with world.waits.on("GPUs"):
        await world.advance(EVERY_S / 2)
    await world.advance(10 * EVERY_S)
    assert (world.lines, world.timer.due) == ([], [])
    with world.waits.on("GPUs"):
        for _ in range(3):
            await world.advance(EVERY_S)
    assert [line.split("(")[1].split()[0] for line in world.lines] == ["10", "20", "30"]


async def test_waits_that_follow_each_other_have_a_line_every_ten_seconds_of_all_of_them() -> None:
    world = World()
    for what in ("Ray", "reports", "places"):
        with world.waits.on(what):
            for _ in range(3):
                await world.advance(EVERY_S / 4)
    assert world.lines == [
        "waiting for reports (2 s so far, no bound)",
        "waiting for places (5 s so far, no bound)",
    ]


async def test_short_waits_of_every_step_have_no_line() -> None:
    world = World()
    for _ in range(100):
        with world.waits.on("reports"):
            await world.advance(EVERY_S / 50)
        await world.advance(EVERY_S / 50)
    assert world.lines == []


async def test_a_line_names_the_oldest_waits_and_counts_the_others() -> None:
    world = World()
    entered = [world.waits.on(f"student/{index} to start") for index in range(MAX_NAMED + 5)]
    for one in entered:
        one.__enter__()
    await world.advance(EVERY_S)
    for one in entered:
        one.__exit__(None, None, None)
    assert world.lines[0].endswith("; 5 others")
    assert f"student/{MAX_NAMED - 1} " in world.lines[0]
    assert f"student/{MAX_NAMED} " not in world.lines[0]
