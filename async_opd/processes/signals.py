"""SIGINT and SIGTERM: asked once, a run ends by itself; asked again, or too slow, it is ended.

first signal ──► the work is cancelled: checkpoint, model, engines down ──► exit
     └── grace_s over, or a second SIGINT ──► children killed ──► exit at once
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

EXIT_CODE = 130
"""Of a process that is ended, if its last words fail."""


class SignalHandler:
    """Handles both signals in the running loop, for the task ``work``.

    ``on_forced_exit(why)`` is called before a process that does not end in time is ended, with the
    exit code that it returns.
    """

    def __init__(
        self, work: asyncio.Task[Any], grace_s: float, on_forced_exit: Callable[[str], int]
    ) -> None:
        self._work = work
        self._grace_s = grace_s
        self._on_forced_exit = on_forced_exit
        self._timer: threading.Timer | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signal, number)

    def signal(self, number: int) -> None:
        """A signal came."""
        if self._timer is None:
            why = f"not ended {self._grace_s:g} s after the signal (shutdown.grace_s)"
            self._timer = threading.Timer(self._grace_s, self._end, [why])
            self._timer.daemon = True
            self._timer.start()
            self._work.cancel()
        elif number == signal.SIGINT:
            self._end("by a second SIGINT")

    def over(self) -> None:
        """The work is done: nobody needs to be ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, why: str) -> None:
        """Also from the timer's thread, when the event loop is stuck."""
        code = EXIT_CODE
        try:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    process.kill()
            code = self._on_forced_exit(why)
        finally:
            os._exit(code)
