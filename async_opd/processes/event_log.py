"""What happened in a stage and people should know, line by line, until it was heard."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from async_opd.core.stages import Events


class EventLog:
    """For one listener, who says how far it has heard: an answer that is lost loses no line.

    Lines are numbered from the time of birth: no number comes twice, whoever restarts.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._next = time.time_ns()
        self._appended = asyncio.Event()

    def append(self, line: str) -> None:
        """One line more."""
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
