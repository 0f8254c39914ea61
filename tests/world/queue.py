"""The real queue, with a timer that tests move, and as one that can die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from async_opd.core.stages import PROMPTS, topics
from async_opd.queue.message_queue import MessageQueue
from async_opd.queue.payloads import PayloadStores
from async_opd.waiting.deadline import Timer
from tests.world.prompts import TEACHERS

LEASE_S = 60.0


def message_queue(
    *teachers: str,
    timer: Timer | None = None,
    size: int = 64,
    stores: PayloadStores | None = None,
) -> MessageQueue:
    """The real one, for these teachers; groups of prompts stay until they are acknowledged."""
    names = topics(teachers or TEACHERS)
    return MessageQueue(names, size, 1 << 20, LEASE_S, timer, kept=(PROMPTS,), stores=stores)


class MortalQueue:
    """The real queue, which can die: calls break off and are made again, as ``QueueProxy`` does."""

    def __init__(self, build: Callable[[], MessageQueue] = message_queue) -> None:
        self._build = build
        self.now, self._death = build(), asyncio.Event()
        self.reissue = asyncio.Event()
        """Supervision is to issue everything in flight again."""

    def die(self) -> None:
        self._death.set()
        self.now, self._death = self._build(), asyncio.Event()
        self.reissue.set()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            while True:
                end = asyncio.create_task(self._death.wait())
                work = asyncio.create_task(getattr(self.now, name)(*args, **named))
                try:
                    await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
                    if not end.done():
                        return await work
                finally:
                    end.cancel()
                    work.cancel()

        return call
