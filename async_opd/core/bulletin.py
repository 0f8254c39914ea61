"""What happened in a stage and people should know, line by line, until it was heard."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from async_opd.core.stages import News


class Bulletin:
    """For one listener, who says how far it has heard: an answer that is lost loses no line.

    Lines are numbered from the time of birth: no number comes twice, whoever restarts.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._next = time.time_ns()
        self._told = asyncio.Event()

    def tell(self, line: str) -> None:
        """One line more."""
        self._lines.append(line)
        self._next += 1
        self._told.set()

    async def after(self, heard: int, wait: bool = True) -> News:
        """Every line from number ``heard`` on; those before are forgotten."""
        while self._lines and self._next - len(self._lines) < heard:
            self._lines.popleft()
        while wait and not self._lines:
            self._told.clear()
            await self._told.wait()
        return News(self._next, tuple(self._lines))
