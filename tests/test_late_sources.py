"""A source of prompts that hangs holds up nothing but admission, and ends the run in time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.core.errors import StageTimeout
from async_opd.core.reports import Captured
from async_opd.core.row import Row
from async_opd.core.samples import DeadLetter, Prompt
from async_opd.data.streamed_rows import StreamedRows
from async_opd.run_prompts import reading_of
from async_opd.waiting.reading_thread import ReadingThread
from tests.world.clock import ManualTimer
from tests.world.prompts import FakePrompts
from tests.world.run import World, world

STALL_S = 100.0


class LatePrompts(FakePrompts):
    """Prompts of which only the first ``good`` come before ``go`` is set."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good, self.go = good, threading.Event()

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        found = super().next(count)  # the cursor passes them before any caller has them
        if self.cursor > self.good:
            self.go.wait(60)
        return found


@dataclass
class Late:
    """A run whose budget of the first version, 12 samples of 6 prompts, is all that comes."""

    world: World
    work: asyncio.Task[None]
    timer: ManualTimer

    async def starved(self) -> None:
        """Returns when all that came is trained."""
        while self.world.pipeline.run_state.step < 3 or not self.timer.due:  # noqa: ASYNC110
            await asyncio.sleep(0)


@contextmanager
def late_run() -> Iterator[Late]:
    made, timer, prompts = world(k=2, s=0.5, n=2, batch_size=4), ManualTimer(), LatePrompts(6)
    reading = ReadingThread("rows of data.train[0]", STALL_S, timer=timer)
    made.rewire(prompts=prompts, reading=reading)
    try:
        yield Late(made, asyncio.create_task(made.pipeline.run()), timer)
    finally:
        prompts.go.set()


async def test_a_source_that_hangs_ends_the_run_with_its_name_and_the_key_of_the_bound() -> None:
    with late_run() as run:
        await asyncio.wait_for(run.starved(), 60)
        run.timer.advance(STALL_S)
        with pytest.raises(
            StageTimeout, match=r"rows of data\.train\[0\] did not come for 100 s"
        ) as caught:
            await asyncio.wait_for(run.work, 60)
        assert "timeouts.stall_s" in caught.value.remedy


async def test_the_error_names_the_streamed_sources_of_the_run_and_no_other() -> None:
    go = threading.Event()

    def rows(start: int) -> Iterator[Row]:
        go.wait(60)
        yield from ()

    late = StreamedRows(rows, 2)
    config = world(stall_s=0.01).pipeline.config
    inputs = SimpleNamespace(train=[[], late], cold_start=[[]])
    job: Any = SimpleNamespace(inputs=inputs, config=config, waits=None)
    try:
        with pytest.raises(StageTimeout, match=r"prompts: rows of data\.train\[1\] did not come"):
            await reading_of(job).run(lambda: late.head)
    finally:
        go.set()


async def test_a_checkpoint_while_a_source_hangs_has_what_was_admitted_and_nothing_else() -> None:
    with late_run() as run:
        await asyncio.wait_for(run.starved(), 60)
        cut = run.world.pipeline.run_state.cut(Captured(3))
        assert (cut.cursor, cut.admitted, cut.ledger.trained, cut.ledger.in_flight) == (
            6,
            12,
            12,
            (),
        )
        run.work.cancel()


async def test_a_signal_ends_a_run_whose_source_hangs() -> None:
    with late_run() as run:
        await asyncio.wait_for(run.starved(), 60)
        run.work.cancel()
        await asyncio.wait({run.work}, timeout=30)
        assert run.work.cancelled()
