"""Sends pieces of rollouts under way ahead to their teachers.

    growing rollouts ──offer──► waiting ──as fast as the queue takes them──► topic early/<teacher>

Advice, so nobody waits for it: while a batch is being put, rollouts grow, and the next piece is the
longer. What is finished before its turn sends no further piece. What the queue refuses is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from async_opd.core.batch import Batch
from async_opd.core.errors import AsyncOPDError
from async_opd.core.stages import Queue, early_topic
from rollouter.growing import Growing

REFUSED = "early_refused"
"""Pieces that the queue did not take, by the kind of its error: ``early_refused/<kind>``."""


class Ahead:
    """One sender per teacher while there is something to send."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._waiting: dict[str, dict[str, Growing]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._refused: Counter[str] = Counter()

    def offer(self, growing: Growing) -> None:
        """A rollout with enough new tokens; an older offer of it is void."""
        teacher = growing.prompt.teacher
        self._waiting.setdefault(teacher, {})[growing.uid] = growing
        if teacher not in self._senders:
            task = asyncio.create_task(self._send(teacher), name=f"ahead {teacher}")
            self._senders[teacher] = task

    def withdraw(self, growing: Growing) -> None:
        """It has ended."""
        self._waiting.get(growing.prompt.teacher, {}).pop(growing.uid, None)

    def close(self) -> None:
        """Nothing more leaves."""
        self._waiting.clear()
        for sender in self._senders.values():
            sender.cancel()
        self._senders.clear()

    def drain(self) -> dict[str, float]:
        """Pieces refused since the last time; nothing if there were none."""
        refused, self._refused = self._refused, Counter()
        return {f"{REFUSED}/{kind}": float(count) for kind, count in refused.items()}

    async def _send(self, teacher: str) -> None:
        try:
            while waiting := self._waiting.pop(teacher, None):
                for pieces in Batch.packed([growing.piece() for growing in waiting.values()]):
                    try:
                        await self._queue.put(early_topic(teacher), pieces)
                    except AsyncOPDError as error:  # the finished rollouts will say what is wrong
                        self._refused[type(error).__name__] += len(pieces)
        finally:
            if self._senders.get(teacher) is asyncio.current_task():
                del self._senders[teacher]
