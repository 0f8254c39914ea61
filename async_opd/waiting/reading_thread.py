"""Reads that may hang, in threads that end with the process: one at a time, bounded by progress.

    run(work) ──its turn──► a thread ──► the work's result
                              └── no progress for ``quiet_s`` ──► StageTimeout; the thread is left

A thread of asyncio's own executor would keep the process from ending while it hangs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from async_opd.core.errors import StageTimeout
from async_opd.waiting.deadline import Bound, Timer
from async_opd.waiting.waits import Waits

Result = TypeVar("Result")


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
        self._turn = asyncio.Lock()
        self._left: asyncio.Future[Any] | None = None  # the work of a caller that was cancelled

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of the work, or its error. StageTimeout without progress.

        A caller that is cancelled leaves the work to its thread: the next work begins after it.
        """
        async with self._turn:
            with self._waits.on(self._what, self._quiet_s, " without progress"):
                if self._left is not None and not self._left.done():
                    await self._until_done(self._left)
                self._left = future = in_daemon_thread(work)
                await self._until_done(future)
                return future.result()

    async def _until_done(self, work: asyncio.Future[Any]) -> None:
        while not work.done():
            before = self._progress()
            try:
                async with Bound(self._quiet_s, self._timer):
                    await asyncio.wait({work})
            except TimeoutError as error:
                if work.done() or self._progress() != before:
                    continue
                cause = f"nothing was read of {self._what} for {self._quiet_s:g} s"
                remedy = (
                    "see whether the source answers; raise timeouts.stall_s if a row can be so "
                    "late (a file of the hub is downloaded as a whole), then go on with --resume"
                )
                raise StageTimeout("prompts", cause, remedy) from error


def in_daemon_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """The result of work in a thread of its own, which ends with the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be left

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            settle(future.set_exception, error)
        else:
            settle(future.set_result, result)

    def settle(how: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(how, value)

    threading.Thread(target=run, name="reads", daemon=True).start()
    return future
