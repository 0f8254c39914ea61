"""Barriers: the last participant to arrive does the work, and all get its result."""

from __future__ import annotations

import asyncio

import pytest

from async_opd.sharing.gpu_turns import Barriers
from tests.world.clock import settle

NAME = ("teacher", 0)


class Work:
    """Counts its calls; ends when released, with an error if it has one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls, self.released = error, 0, asyncio.Event()

    async def __call__(self) -> None:
        self.calls += 1
        await self.released.wait()
        if self.error is not None:
            raise self.error


def arrival(barriers: Barriers, participant: int, work: Work) -> asyncio.Task[None]:
    return asyncio.create_task(barriers.arrive(NAME, participant, (0, 1), work))


async def test_the_work_begins_when_the_last_one_arrives_and_none_goes_on_before_its_end() -> None:
    barriers, work = Barriers(), Work()
    tasks = [arrival(barriers, 0, work)]
    await settle()
    before = work.calls
    tasks.append(arrival(barriers, 1, work))
    await settle()
    assert (before, work.calls, [task.done() for task in tasks]) == (0, 1, [False, False])
    work.released.set()
    await asyncio.gather(*tasks)
    assert work.calls == 1


async def test_every_participant_gets_the_error_of_the_work() -> None:
    barriers, work = Barriers(), Work(OSError("no GPU"))
    work.released.set()
    results = await asyncio.gather(
        *(arrival(barriers, i, work) for i in (0, 1)), return_exceptions=True
    )
    assert results == [work.error, work.error]


async def test_a_participant_whose_caller_gives_up_is_cancelled_while_it_waits() -> None:
    barriers, work = Barriers(), Work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await barriers.arrive(NAME, 0, (0, 1), work)
    assert work.calls == 0
