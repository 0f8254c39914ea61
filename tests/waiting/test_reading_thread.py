"""Reads that hang hold up neither the event loop nor the end of the process, and end in time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from async_opd.core.errors import SourceError, StageTimeout
from async_opd.core.samples import DeadLetter, Prompt
from async_opd.waiting.reading_thread import ReadingThread
from async_opd.waiting.waits import EVERY_S, Waits
from tests.waiting.test_deadline import Run, both_loops
from tests.world.clock import ManualTimer

STALL_S = 100.0


class Source:
    """A source that hangs until ``go`` is set. ``begun`` counts the reads, ``rows`` what came."""

    def __init__(self) -> None:
        self.go, self.begun, self.rows, self.at_once = threading.Event(), 0, 0, 0
        self._asked = threading.Semaphore(0)

    def read(self) -> int:
        self.begun += 1
        self.at_once += 1
        self._asked.release()
        self.go.wait(30)
        self.at_once -= 1
        return self.at_once

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        self.read()
        return []

    async def asked(self) -> None:
        """Returns when a thread reads."""
        assert await asyncio.to_thread(self._asked.acquire, timeout=30)


@contextmanager
def hanging_source() -> Iterator[Source]:
    """A source that hangs within the block."""
    source = Source()
    try:
        yield source
    finally:
        source.go.set()


def hanging_reading(source: Source | None = None) -> tuple[ReadingThread, ManualTimer]:
    """Reads whose time passes when the timer is advanced; ``source`` says what has come."""
    timer = ManualTimer()
    progress = (lambda: 0) if source is None else (lambda: source.rows)
    return ReadingThread("rows of the source", STALL_S, progress=progress, timer=timer), timer


async def hang_for(seconds: float, timer: ManualTimer) -> None:
    """Lets so much time pass once something is waited for with a bound."""
    while not timer.due:  # noqa: ASYNC110
        await asyncio.sleep(0)
    timer.advance(seconds)


@both_loops
def test_the_event_loop_goes_on_while_a_source_hangs_and_its_error_is_raised(run: Run) -> None:
    def fails() -> None:
        raise SourceError("s", "its server is gone")

    async def reads() -> int:
        reading, _ = hanging_reading()
        running = asyncio.create_task(reading.run(source.read))
        await source.asked()
        assert not running.done()
        source.go.set()
        with pytest.raises(SourceError, match="its server is gone"):
            await reading.run(fails)
        return await asyncio.wait_for(running, 30)

    with hanging_source() as source:
        assert run(reads()) == 0


async def test_a_source_that_hangs_is_given_up_with_its_name_and_the_key_of_the_bound() -> None:
    with hanging_source() as source:
        reading, timer = hanging_reading()
        running = asyncio.create_task(reading.run(source.read))
        await hang_for(STALL_S, timer)
        with pytest.raises(
            StageTimeout, match=r"rows of the source did not come for 100 s"
        ) as caught:
            await asyncio.wait_for(running, 30)
        assert "timeouts.stall_s" in caught.value.remedy


async def test_a_source_that_is_slow_is_not_given_up_while_rows_come() -> None:
    with hanging_source() as source:
        reading, timer = hanging_reading(source)
        running = asyncio.create_task(reading.run(source.read))
        for _ in range(5):
            await hang_for(0, timer)
            source.rows += 1
            await hang_for(STALL_S, timer)
            await asyncio.sleep(0)
        assert not running.done()
        source.go.set()
        assert await asyncio.wait_for(running, 30) == 0


async def test_one_work_reads_at_a_time_also_after_one_whose_caller_was_cancelled() -> None:
    with hanging_source() as source:
        reading, _ = hanging_reading()
        first = asyncio.create_task(reading.run(source.read))
        await source.asked()
        first.cancel()
        await asyncio.wait({first})
        others = [asyncio.create_task(reading.run(source.read)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (first.cancelled(), source.begun) == (True, 1)
        source.go.set()
        assert await asyncio.wait_for(asyncio.gather(*others), 30) == [0, 0, 0]


async def test_a_work_after_one_that_hangs_for_good_is_given_up_too() -> None:
    with hanging_source() as source:
        reading, timer = hanging_reading()
        first = asyncio.create_task(reading.run(source.read))
        await source.asked()
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.create_task(reading.run(source.read))
        await hang_for(STALL_S, timer)
        with pytest.raises(StageTimeout):
            await asyncio.wait_for(second, 30)
        assert source.begun == 1


async def test_a_late_source_has_lines_that_name_it() -> None:
    with hanging_source() as source:
        timer, lines = ManualTimer(), list[str]()
        waits = Waits(lines.append, timer, timer.clock)
        reading = ReadingThread("rows of the source", STALL_S, waits=waits, timer=timer)
        running = asyncio.create_task(reading.run(source.read))
        await source.asked()
        await timer.passes(EVERY_S)
        assert lines == [
            "waiting for rows of the source (10 s so far, at most 100 s without progress)"
        ]
        running.cancel()


HANGS = """
import asyncio, threading
from async_opd.waiting.reading_thread import ReadingThread

async def main():
    running = asyncio.create_task(ReadingThread("s", 1e9).run(threading.Event().wait))
    await asyncio.sleep(0)
    running.cancel()

asyncio.run(main())
"""


def test_a_process_ends_while_a_source_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=60)
