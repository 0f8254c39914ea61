"""Reads that may hang, in a thread that ends with the process: one at a time, and bounded.

    run(work) ──its turn──► the thread ──► the work's result
                              └── no progress for ``quiet_s`` ──► StageTimeout; the thread hangs on

A thread of asyncio's own executor would keep the process from ending while it hangs.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from async_opd.core.errors import StageTimeout
from async_opd.waiting.deadline import Bound, Timer
from async_opd.waiting.waits import Waits

Result = TypeVar("Result")
_Works = SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None]


class ReadingThread:
    """Runs one work at a time. ``what`` is read, as the errors and the lines of ``waits`` say.

    ``progress()`` grows with what the work has read; it is called beside the work. A work without
    progress for ``quiet_s`` (``timeouts.stall_s``) is given up, up to as long again later.
    """

    def __init__(
        self,
        what: str,
        quiet_s: float,
        *,
        progress: Callable[[], int] = lambda: 0,
        waits: Waits | None = None,
        timer: Timer | None = None,
    ) -> None:
        self._what, self._quiet_s = what, quiet_s
        self._progress = progress
        self._waits = waits or Waits(lambda line: None)
        self._timer = timer
        self._works: _Works = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of the work, or its error. StageTimeout without progress.

        A caller that is cancelled leaves a work that has begun to the thread: the next work begins
        after it.
        """
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._works.put((work, done))
        if self._thread is None:
            self._thread = threading.Thread(target=_read, args=[self._works], daemon=True)
            self._thread.start()
            weakref.finalize(self, self._works.put, None)
        try:
            with self._waits.on(self._what, self._quiet_s, " without progress"):
                await self._until(done)
        finally:
            done.cancel()
        return done.result()

    async def _until(self, done: asyncio.Future[Any]) -> None:
        while not done.done():
            before = self._progress()
            try:
                async with Bound(self._quiet_s, self._timer):
                    await asyncio.wait({done})
            except TimeoutError as error:
                if done.done() or self._progress() != before:
                    continue
                cause = f"{self._what} did not come for {self._quiet_s:g} s"
                remedy = (
                    "see whether the source answers; raise timeouts.stall_s if a row can be so "
                    "late (a file of the hub is downloaded as a whole), then go on with --resume"
                )
                raise StageTimeout("prompts", cause, remedy) from error


def _read(works: _Works) -> None:
    """The thread: works, in order, until there is None."""
    while (item := works.get()) is not None:
        work, done = item
        if done.cancelled():
            continue
        settle: Callable[[Any], None] = done.set_result
        try:
            value = work()
        except BaseException as error:
            settle, value = done.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: the process ends
            done.get_loop().call_soon_threadsafe(_settle, done, settle, value)
        del item, work, done, settle, value  # what they hold is not the thread's


def _settle(done: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not done.done():  # its caller was not cancelled
        settle(value)
