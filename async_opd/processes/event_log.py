"""The messages of a stage for run.log, kept until the driver has read them."""

from __future__ import annotations

import asyncio
from collections import deque

from async_opd.core.reports import Events
from async_opd.processes.numbers import Numbers


class EventLog:
    """Lines for one reader, which says up to which number it has read: a lost answer loses no line.

    A reader that has read another process's lines has read none of these.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._numbers = Numbers()
        self._appended = asyncio.Event()

    def append(self, line: str) -> None:
        """Adds a line."""
        self._lines.append(line)
        self._numbers.take()
        self._appended.set()

    async def after(self, seen: int, wait: bool = True) -> Events:
        """Every line from number ``seen`` on; those before are forgotten."""
        if seen in self._numbers:
            while self._lines and self._numbers.next - len(self._lines) < seen:
                self._lines.popleft()
        while wait and not self._lines:
            self._appended.clear()
            await self._appended.wait()
        return Events(self._numbers.next, tuple(self._lines))
