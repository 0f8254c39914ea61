"""SIGINT and SIGTERM: asked once, a run ends by itself; asked again, or too slow, it is ended.

first signal ──► the work is cancelled: checkpoint, model, engines down ──► exit
     └── grace_s over, or a second SIGINT ──► children killed ──► exit at once
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

EXIT_CODE = 130
"""Of a process that is ended, if its last words fail."""


class Interruption:
    """Handles both signals in the running loop, for the task ``work``.

    ``last_words(why)`` is called before a process that does not end in time is ended, with the
    exit code that it returns.
    """

    def __init__(
        self, work: asyncio.Task[Any], grace_s: float, last_words: Callable[[str], int]
    ) -> None:
        self._work = work
        self._grace_s = grace_s
        self._last_words = last_words
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
            for pid in descendants(os.getpid()):
                _kill(pid)
            code = self._last_words(why)
        finally:
            os._exit(code)


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, the nearest first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for child, parent in _parents():
        children[parent].append(child)
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children[parent]]
        found += level
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            yield int(folder.name), int(stat.rpartition(")")[2].split()[1])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
