"""SIGINT and SIGTERM: the first cancels the run; a second SIGINT, or a late end, kills it.

first signal ──► the work is cancelled: checkpoint, model, engines down ──► exit
     └── grace_s over, or a second SIGINT ──► children killed ──► exit at once
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

EXIT_CODE = 130
"""The exit code of a killed process whose ``on_forced_exit`` fails."""


@contextmanager
def signals_set(arrived: threading.Event) -> Iterator[None]:
    """Both signals set the event, in a wait of the main thread that no event loop looks after.

    The handlers from before come back afterwards. Another thread gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: arrived.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)


class SignalHandler:
    """Handles both signals in the running loop, for the task ``work``.

    Only the main thread receives signals: elsewhere ``work_ended`` is cancelled instead.
    ``on_forced_exit(why)`` is called before the process is killed because the work did not end in
    time; it returns the exit code. ``notify`` gets a line at the first signal.
    """

    def __init__(
        self,
        work: asyncio.Task[Any],
        grace_s: float,
        on_forced_exit: Callable[[str], int],
        notify: Callable[[str], None],
    ) -> None:
        self._work = work
        self._grace_s = grace_s
        self._on_forced_exit = on_forced_exit
        self._notify = notify
        self._timer: threading.Timer | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signal, number)

    def signal(self, number: int) -> None:
        """Called for each SIGINT or SIGTERM."""
        if self._timer is None:
            why = f"the run did not end {self._grace_s:g} s after a signal (shutdown.grace_s)"
            self._timer = threading.Timer(self._grace_s, self._end, [why])
            self._timer.daemon = True
            self._timer.start()
            self._work.cancel()  # first: the message may not be written on a full disk
            self._notify(
                "a signal ends the run, with a checkpoint if it began to train; another SIGINT "
                "(Ctrl-C) ends it at once"
            )
        elif number == signal.SIGINT:
            self._end("a second SIGINT ended the run at once")

    async def work_ended(self) -> None:
        """Waits for the work, and raises its error. A cancellation counts as a SIGINT."""
        while not self._work.done():
            try:
                await asyncio.wait({self._work})
            except asyncio.CancelledError:
                self.signal(signal.SIGINT)
        await self._work

    def over(self) -> None:
        """Stops the timer of the forced exit: the work is done."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, why: str) -> None:
        """Kills the children and exits; called by the timer's thread if the event loop hangs."""
        code = EXIT_CODE
        try:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    process.kill()
            code = self._on_forced_exit(why)
        finally:
            os._exit(code)
