"""The messages of a stage for run.log, kept until the driver has read them."""

from __future__ import annotations

import asyncio
from collections import deque
from secrets import randbits

from async_opd.core.reports import Events


class EventLog:
    """Lines for one reader, which says up to which number it has read: a lost answer loses no line.

    Numbers begin at a random one: a reader of another process's lines has read none of these.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._first = self._next = randbits(62)  # the clock of a dead process may have been ahead
        self._appended = asyncio.Event()

    def append(self, line: str) -> None:
        """Adds a line."""
        self._lines.append(line)
        self._next += 1
        self._appended.set()

    async def after(self, seen: int, wait: bool = True) -> Events:
        """Every line from number ``seen`` on; those before are forgotten."""
        if self._first <= seen <= self._next:
            while self._lines and self._next - len(self._lines) < seen:
                self._lines.popleft()
        while wait and not self._lines:
            self._appended.clear()
            await self._appended.wait()
        return Events(self._next, tuple(self._lines))
