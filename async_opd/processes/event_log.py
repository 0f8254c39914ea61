"""The messages of a stage for run.log, kept until the driver has read them."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from async_opd.core.reports import Events


class EventLog:
    """Lines for one reader, which says up to which number it has read: a lost answer loses no line.

    Numbers start at the process's start time in nanoseconds, so no restart uses one twice.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._next = time.time_ns()
        self._appended = asyncio.Event()

    def append(self, line: str) -> None:
        """Adds a line."""
        self._lines.append(line)
        self._next += 1
        self._appended.set()

    async def after(self, seen: int, wait: bool = True) -> Events:
        """Every line from number ``seen`` on; those before are forgotten."""
        while self._lines and self._next - len(self._lines) < seen:
            self._lines.popleft()
        while wait and not self._lines:
            self._appended.clear()
            await self._appended.wait()
        return Events(self._next, tuple(self._lines))
