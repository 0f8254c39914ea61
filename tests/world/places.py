"""Places of members in a cluster, which a test gives and takes."""

from __future__ import annotations

import asyncio


class FakePlaces:
    """The places of members: those that have one, and words for the nodes that drain."""

    def __init__(self, *placed: int) -> None:
        self.there = set(placed)
        self.words: dict[int, str] = {}
        self.changed = asyncio.Event()

    async def placed(self, index: int) -> None:
        while index not in self.there:
            self.changed.clear()
            await self.changed.wait()

    async def draining(self) -> dict[int, str]:
        return self.words

    def give(self, index: int) -> None:
        self.there.add(index)
        self.changed.set()
