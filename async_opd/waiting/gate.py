"""A gate that work passes; closing it waits until no work is inside."""

from __future__ import annotations

import asyncio


class Gate:
    """Open at first. Enter with ``async with``; while it is closed, entering waits."""

    def __init__(self) -> None:
        self._inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._abandoned = 0

    async def __aenter__(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()

    async def __aexit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    @property
    def closed(self) -> bool:
        """Whether work that comes now waits."""
        return not self._open.is_set()

    async def empty(self) -> None:
        """Returns when no work is inside."""
        await self._empty.wait()

    async def close(self) -> bool:
        """Lets no work enter any more; returns when none is inside.

        False if ``open`` or ``abandon_close`` was called meanwhile: the gate may be open, or
        another call may be closing it.
        """
        abandoned = self._abandoned
        self._open.clear()
        await self._empty.wait()
        return self._abandoned == abandoned

    def abandon_close(self) -> None:
        """Makes every ``close`` under way return False; the gate stays closed until ``open``."""
        self._abandoned += 1

    def open(self) -> None:
        """Lets work enter, first of all the work that waits."""
        self.abandon_close()
        self._open.set()
