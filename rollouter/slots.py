"""How many rollouts a replica samples at the same time, and who decides it.

A fixed number, or what the engine can hold: ``AdaptiveLimit`` watches its waiting requests, its
preemptions and its KV cache after every engine step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


class Slots:
    """A semaphore whose size can change; the longest waiting goes first."""

    def __init__(self, limit: int, group_size: int = 1) -> None:
        self.limit = limit
        self.running = 0
        self._group_size = group_size
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()

    async def room(self) -> int:
        """Waits until a slot is free that nobody waits for; the number of groups to start."""
        while self._waiting or self.running >= self.limit:
            self._changed.clear()
            await self._changed.wait()
        return max(1, (self.limit - self.running) // self._group_size)

    def resize(self, limit: int) -> None:
        """Another size; who runs goes on even if it shrinks."""
        if limit != self.limit:
            self.limit = limit
            self._settle()

    def reserve(self) -> SlotReservation:
        """Queues up for a slot, now; enter it with ``async with``."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ready)
        self._settle()
        return SlotReservation(self, ready)

    def release(self) -> None:
        """A slot is free again."""
        self.running -= 1
        self._settle()

    def _settle(self) -> None:
        while self._waiting and self.running < self.limit:
            ready = self._waiting.popleft()
            if not ready.done():
                self.running += 1
                ready.set_result(None)
        self._changed.set()


class SlotReservation:
    """A place in the queue for a slot, then the slot."""

    def __init__(self, slots: Slots, ready: asyncio.Future[None]) -> None:
        self._slots = slots
        self._ready = ready

    async def __aenter__(self) -> None:
        try:
            await self._ready
        except asyncio.CancelledError:
            if self._ready.done() and not self._ready.cancelled():
                self._slots.release()  # it was our turn, and we do not take it
            raise

    async def __aexit__(self, *error: object) -> None:
        self._slots.release()


@dataclass(frozen=True)
class EngineLoad:
    """An engine after one step.

    Requests it runs, requests it has no room for, how many it had to preempt in this step, and the
    used share of its KV cache.
    """

    running: int
    waiting: int
    preempted: int
    kv_cache: float


@dataclass
class AdaptiveLimit:
    """The number of requests in flight that keeps an engine full and makes it preempt nothing.

    Grows by one a step while the engine takes everything it is given and its KV cache is below
    ``KV_LOW``; a few more than ``max_num_seqs`` may wait in the engine, so that a slot that becomes
    free is filled without a trip to the queue. Falls to what runs when the engine preempts, or
    when requests wait although ``max_num_seqs`` are not running: then its KV cache is full.
    """

    max_num_seqs: int
    limit: int = 0

    KV_LOW = 0.9

    def __post_init__(self) -> None:
        self.max_limit = self.max_num_seqs + max(1, self.max_num_seqs // 16)
        self.limit = self.limit or self.max_limit

    def observe(self, load: EngineLoad) -> int:
        """The limit after this engine step."""
        full = load.running >= self.max_num_seqs
        if load.preempted or (load.waiting and not full and load.kv_cache > self.KV_LOW):
            self.limit = max(1, load.running)
        elif load.running + load.waiting >= self.limit and load.kv_cache < self.KV_LOW:
            self.limit = min(self.max_limit, self.limit + 1)
        return self.limit
