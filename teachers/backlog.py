"""What the teachers of one host hold until it is their turn.

topic rollouts/<teacher> ──lease──► held ──turn──► jobs: leases joined, requests
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from async_opd.core.batch import MESSAGE_BYTES
from async_opd.core.lease import Lease

BacklogRequest = Callable[[], Awaitable[None]]


class ScoreBacklog:
    """Leases and requests by teacher. ``backlog_size`` rollouts in all make it full.

    Each teacher holds at most a wave; what is scored counts until its samples are in the queue.
    """

    def __init__(self, teachers: Sequence[str], backlog_size: int) -> None:
        self._size = backlog_size
        self._leases: dict[str, deque[Lease]] = {name: deque() for name in teachers}
        self._requests: dict[str, deque[BacklogRequest]] = {name: deque() for name in teachers}
        self._taken = dict.fromkeys(teachers, 0)  # rollouts held, or scored and not in the queue
        self._left: float = math.inf  # rollouts that this shift may still take
        self._changed = asyncio.Condition()

    @property
    def held(self) -> dict[str, int]:
        """Rollouts that wait for their teacher's turn."""
        return {name: sum(len(lease) for lease in leases) for name, leases in self._leases.items()}

    @property
    def longest(self) -> str | None:
        """The teacher with a request, else the one that holds most; None if there is no work."""
        asked = [name for name, requests in self._requests.items() if requests]
        held = self.held
        most = max(held, key=lambda name: held[name])
        return asked[0] if asked else most if held[most] and self._left > 0 else None

    def begin(self) -> None:
        """A shift: it takes what is held now, or a wave, and leaves what comes later."""
        self._left = max(self._size, sum(self.held.values()))

    def end(self) -> None:
        """It is over."""
        self._left = math.inf

    async def room(self, teacher: str) -> int:
        """Waits until the teacher may hold more; how many."""
        await self._until(lambda: self._taken[teacher] < self._size)
        return self._size - self._taken[teacher]

    async def hold(self, teacher: str, lease: Lease) -> None:
        """Rollouts that wait from now on."""
        self._leases[teacher].append(lease)
        self._taken[teacher] += len(lease)
        await self._tell()

    async def add_request(self, teacher: str, request: BacklogRequest) -> None:
        """Work that is not rollouts."""
        self._requests[teacher].append(request)
        await self._tell()

    async def wait_for_work(self) -> None:
        """Returns when there is work."""
        await self._until(lambda: self.longest is not None)

    async def wait_for_backlog(self) -> None:
        """Returns when there is a wave, or a request."""
        await self._until(
            lambda: sum(self.held.values()) >= self._size or any(self._requests.values())
        )

    def next_request(self, teacher: str) -> BacklogRequest | None:
        """A request, if there is one."""
        return self._requests[teacher].popleft() if self._requests[teacher] else None

    def next_leases(self, teacher: str, at_most: int, tokens: float = math.inf) -> list[Lease]:
        """Whole leases of at most so many rollouts, tokens and bytes; one if there is any."""
        leases = self._leases[teacher]
        taken: list[Lease] = []
        rollouts, nbytes = at_most, MESSAGE_BYTES
        while leases and self._left > 0:
            lease = leases[0]
            rollouts, nbytes = rollouts - len(lease), nbytes - lease.nbytes
            tokens -= lease.tokens
            if taken and min(rollouts, nbytes, tokens) < 0:
                break
            taken.append(leases.popleft())
            self._left -= len(lease)
        return taken

    async def mark_queued(self, teacher: str, rollouts: int) -> None:
        """Their samples are in the queue."""
        self._taken[teacher] -= rollouts
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, so: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(so)
