"""Turns on GPUs that two pools share, alone, and barriers: the last to arrive does the work."""

from __future__ import annotations

import asyncio

import pytest

from async_opd.sharing.gpu_turns import Barriers, GpuTurns
from tests.world.clock import ManualTimer, settle


class Gpu:
    """Writes down what is done on it."""

    def __init__(self, linger_s: float = 1.0) -> None:
        self.done: list[str] = []
        self.timer = ManualTimer()
        self.turns = GpuTurns(linger_s, self.timer)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def work(self, what: str) -> None:
        async with self.turns:
            self.done.append(what)
            await self.goes_on.wait()

    async def _onload(self) -> None:
        self.done.append("onload")

    async def _offload(self) -> None:
        self.done.append("offload")

    async def begins(self, what: str) -> asyncio.Task[None]:
        work = asyncio.create_task(self.work(what))
        await settle()
        return work

    async def turn(self) -> asyncio.Task[None]:
        taken = asyncio.create_task(self.turns.take(self._onload, self._offload))
        await settle()
        return taken

    async def lingers(self, seconds: float) -> None:
        await self.timer.passes(seconds)


async def test_work_waits_for_a_turn_of_which_also_work_within_the_linger_time_is() -> None:
    gpu = Gpu()
    await gpu.begins("step")
    assert gpu.done == []
    await gpu.turn()
    await gpu.lingers(0.9)
    await gpu.begins("snapshot")
    await gpu.lingers(0.9)
    assert gpu.done == ["onload", "step", "snapshot"]
    await gpu.lingers(1)
    assert gpu.done[-1] == "offload"


async def test_a_turn_lasts_as_long_as_its_work() -> None:
    gpu = Gpu()
    gpu.goes_on.clear()
    await gpu.begins("step")
    await gpu.turn()
    await gpu.lingers(100)
    assert gpu.done == ["onload", "step"]


async def test_work_that_comes_after_a_turn_waits_for_the_next() -> None:
    gpu = Gpu()
    await gpu.begins("step")
    await gpu.turn()
    await gpu.lingers(1)
    await gpu.begins("snapshot")
    assert gpu.done[-1] == "offload"
    await gpu.turn()
    assert gpu.done[-1] == "snapshot"


async def test_without_work_no_turn_moves_anything() -> None:
    gpu = Gpu()
    assert (await gpu.turn()).done()
    assert gpu.done == []


async def test_work_that_is_cancelled_wants_no_turn_any_more() -> None:
    gpu = Gpu()
    work = await gpu.begins("step")
    await asyncio.wait_for(gpu.turns.wanted(), 5)
    work.cancel()
    await settle()
    wanted = asyncio.create_task(gpu.turns.wanted())
    await settle()
    assert not wanted.done()
    wanted.cancel()


async def test_a_turn_outlives_its_caller_and_is_over_when_it_has_offloaded() -> None:
    gpu = Gpu()
    gpu.goes_on.clear()
    await gpu.begins("step")
    caller = await gpu.turn()
    caller.cancel()
    over = asyncio.create_task(gpu.turns.over())
    await gpu.lingers(1)
    assert not over.done()
    gpu.goes_on.set()
    await settle()
    await gpu.lingers(1)
    await asyncio.wait_for(over, 5)
    assert gpu.done == ["onload", "step", "offload"]


async def test_an_onload_that_fails_is_the_error_of_the_turn_and_no_work_begins() -> None:
    gpu = Gpu()

    async def fails() -> None:
        raise MemoryError("out of memory")

    gpu._onload = fails  # type: ignore[method-assign]
    step = await gpu.begins("step")
    with pytest.raises(MemoryError):
        await (await gpu.turn())
    with pytest.raises(MemoryError):
        await step
    assert gpu.done == []


@pytest.mark.parametrize("released", [True, False], ids=["until it is released", "not for ever"])
async def test_a_turn_that_is_held_lasts(released: bool) -> None:
    gpu = Gpu()
    holding = asyncio.create_task(gpu.turns.hold(30))
    await settle()
    await gpu.turn()
    await asyncio.wait_for(holding, 5)
    await gpu.lingers(29)
    assert gpu.done == ["onload"]
    if released:
        gpu.turns.release()
        await settle()
    await gpu.lingers(1)
    await gpu.lingers(1)
    assert gpu.done == ["onload", "offload"]


async def test_work_gets_the_error_of_a_turn_whose_caller_has_gone() -> None:
    gpu = Gpu()

    async def no_memory() -> None:
        await gpu.goes_on.wait()
        raise RuntimeError("no memory")

    gpu.goes_on.clear()
    step = await gpu.begins("step")
    taken = asyncio.create_task(gpu.turns.take(no_memory, gpu._offload))
    await settle()
    taken.cancel()
    await settle()
    gpu.goes_on.set()
    await settle()
    assert step.done()
    with pytest.raises(RuntimeError, match="no memory"):
        await step
    with pytest.raises(RuntimeError, match="no memory"):
        await gpu.work("snapshot")


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
