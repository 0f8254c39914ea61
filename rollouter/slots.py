"""Slots bound the number of rollouts that a replica samples at the same time.

Evaluations have separate slots beside them, the fewer the more rollouts run: no rollout waits
for a slot because of an evaluation.

The number is fixed, or follows the engine: ``AdaptiveLimit`` reads its waiting requests, its
preemptions and its KV cache after every engine step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Literal

SlotReservation = AbstractAsyncContextManager[None]
EVALUATION_SHARE = 8
"""An evaluation may have one in so many slots however many rollouts run, so that it ends."""


class Slots:
    """A semaphore whose limit can change.

    The oldest reservation gets the next free slot, of those for the latest turn of an episode: its
    prefix is in the engine's cache, and episodes end in about the order in which they began.
    """

    def __init__(self, limit: int, group_size: int = 1) -> None:
        self.limit = limit
        self.running = 0
        self.evaluating = 0
        self._group_size = group_size
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = count()
        self._evaluations: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()

    async def room(self) -> int:
        """Waits for a free slot that no reservation waits for; returns how many groups to start."""
        while self._waiting or self.running >= self.limit:
            self._changed.clear()
            await self._changed.wait()
        return max(1, (self.limit - self.running) // self._group_size)

    def resize(self, limit: int) -> None:
        """Changes the limit. Running rollouts go on, also those beyond a lower limit."""
        if limit != self.limit:
            self.limit = limit
            self._settle()

    def reserve(self, turn: int = 0) -> SlotReservation:
        """Queues for a slot at once; ``async with`` on the result waits for it and holds it."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (-turn, next(self._numbers), ready))
        self._settle()
        return self._slot(ready)

    @asynccontextmanager
    async def _slot(self, ready: asyncio.Future[None]) -> AsyncIterator[None]:
        try:
            await ready
            yield
        finally:
            # A cancelled wait holds a slot too, if ``_settle`` gave it one before it resumed.
            if ready.done() and not ready.cancelled():
                self.running -= 1
                self._settle()

    @property
    def for_evaluation(self) -> int:
        """See the function of this name."""
        return for_evaluation(self.limit, self.running)

    @asynccontextmanager
    async def evaluation(self) -> AsyncIterator[None]:
        """Waits for a slot of evaluations and holds it."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._evaluations.append(ready)
        self._settle()
        try:
            await ready
            yield
        finally:
            if ready.done() and not ready.cancelled():
                self.evaluating -= 1
                self._settle()

    def _settle(self) -> None:
        while self._waiting and self.running < self.limit:
            self.running += _begun(heappop(self._waiting)[2])
        while self._evaluations and self.evaluating < self.for_evaluation:
            self.evaluating += _begun(self._evaluations.popleft())
        self._changed.set()


def for_evaluation(limit: int, running: int) -> int:
    """Slots of evaluations: what is left if the running rollouts double, at least an eighth."""
    return max(1, limit // EVALUATION_SHARE, limit - 2 * running)


def _begun(ready: asyncio.Future[None]) -> bool:
    """Gives the future its slot. Whether it still waited for one."""
    if ready.done():
        return False
    ready.set_result(None)
    return True


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine after one step.

    Numbers of running requests, of requests that wait in the engine and of those that this step
    preempted; the used fraction of the KV cache, 0 to 1.
    """

    running: int
    waiting: int
    preempted: int
    kv_cache: float


@dataclass
class AdaptiveLimit:
    """The number of requests in flight that keeps an engine full without preemptions.

    It grows by one a step while the engine has as many requests as allowed and its KV cache is
    below ``KV_LOW``. Its maximum is a little above ``max_num_seqs``: some requests wait in the
    engine, which starts them without a call to the queue. It falls to the running requests when the
    engine preempts, or when requests wait although fewer than ``max_num_seqs`` run: then the KV
    cache is full.
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


def first_limit(concurrency: int | Literal["auto"], max_num_seqs: int) -> int:
    """Rollouts in flight on a replica when it starts, and for good if ``concurrency`` is a number.

    A number cannot exceed the maximum of ``AdaptiveLimit``. The engine starts requests in their
    order, so that held rows of the proof of freshness wait for all that wait there before them; and
    another replica may have room for these.
    """
    most = AdaptiveLimit(max_num_seqs).max_limit
    return most if concurrency == "auto" else min(concurrency, most)
