"""Fails pending calls into an engine when its process ends.

    work ─────────┬──► its result
    process ends ─┴──► ProcessDied

vLLM's client fails the requests of an engine that is gone, but not the calls that were under way: a
broadcast into a killed engine would hold its weight sync until ``sync.timeout_s``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable
from typing import NoReturn, TypeVar

from async_opd.core.errors import ProcessDied
from async_opd.processes.last_lines import last_error_line
from async_opd.waiting.race import race

Result = TypeVar("Result")


class ExitWatch:
    """Watches processes by their ``sentinels``, which become readable when a process ends.

    ``sentinels`` are multiprocessing's.
    """

    def __init__(self, name: str, sentinels: Iterable[int]) -> None:
        self._name = name
        # copies: the engine's client closes its own, whose numbers may then be other files
        self._sentinels = [os.dup(sentinel) for sentinel in sentinels]
        self._ended = asyncio.Event()
        self._watched = False
        self._last_error = ""

    async def within(self, work: Awaitable[Result]) -> Result:
        """The work's result. ProcessDied as soon as one of the processes has ended."""
        self._watch()
        return await race(work, self._death())

    async def _death(self) -> NoReturn:
        await self._ended.wait()
        last = f"; {self._last_error}" if self._last_error else ""
        raise ProcessDied(self._name, f"its engine's process has ended{last}", "see its log")

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            for sentinel in self._sentinels:
                asyncio.get_running_loop().add_reader(sentinel, self._end)

    def _end(self) -> None:
        """Called once; the other sentinels are watched no more."""
        self._last_error = last_error_line()
        self._ended.set()
        for sentinel in self._sentinels:
            asyncio.get_running_loop().remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels = []
