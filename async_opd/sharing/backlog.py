"""The score backlog: leases and requests that wait until their teachers have the GPUs.

topic rollouts/<teacher> ──lease──► held ──scoring phase──► calls: joined leases, requests
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from async_opd.core.batch import MESSAGE_BYTES
from async_opd.core.stages import Lease

BacklogRequest = Callable[[], Awaitable[None]]


class ScoreBacklog:
    """Leases and requests of the teachers of one GPU host, by teacher.

    ``backlog_size`` rollouts of all teachers make it full. Each teacher holds at most as many;
    scored rollouts count until their samples are in the queue.
    """

    def __init__(self, teachers: Sequence[str], backlog_size: int) -> None:
        self._size = backlog_size
        self._leases: dict[str, deque[Lease]] = {name: deque() for name in teachers}
        self._requests: dict[str, deque[BacklogRequest]] = {name: deque() for name in teachers}
        # rollouts held, or scored and not yet in the queue
        self._taken = dict.fromkeys(teachers, 0)
        self._left: float = math.inf  # rollouts that this scoring phase may still take
        self._changed = asyncio.Condition()

    @property
    def held(self) -> dict[str, int]:
        """Number of rollouts that each teacher holds."""
        return {name: sum(len(lease) for lease in leases) for name, leases in self._leases.items()}

    @property
    def next_teacher(self) -> str | None:
        """A teacher with a request, else the one that holds most; None if there is no work."""
        asked = [name for name, requests in self._requests.items() if requests]
        held = self.held
        most = max(held, key=lambda name: held[name])
        return asked[0] if asked else most if held[most] and self._left > 0 else None

    def begin(self) -> None:
        """Begins a scoring phase, which takes the rollouts held now, or ``backlog_size`` if more.

        Later ones stay for the next phase: otherwise a phase would last as long as rollouts arrive.
        """
        self._left = max(self._size, sum(self.held.values()))

    def end(self) -> None:
        """Ends the scoring phase."""
        self._left = math.inf

    async def room(self, teacher: str) -> int:
        """Waits until the teacher may hold more rollouts; returns how many."""
        await self._until(lambda: self._taken[teacher] < self._size)
        return self._size - self._taken[teacher]

    async def hold(self, teacher: str, lease: Lease) -> None:
        """Adds the rollouts of a lease."""
        self._leases[teacher].append(lease)
        self._taken[teacher] += len(lease)
        await self._notify()

    async def add_request(self, teacher: str, request: BacklogRequest) -> None:
        """Adds other work than rollouts."""
        self._requests[teacher].append(request)
        await self._notify()

    async def wait_for_work(self) -> None:
        """Returns when a teacher has a request or a rollout."""
        await self._until(lambda: self.next_teacher is not None)

    async def wait_for_backlog(self) -> None:
        """Returns when ``backlog_size`` rollouts are held, or a teacher has a request."""
        await self._until(
            lambda: sum(self.held.values()) >= self._size or any(self._requests.values())
        )

    def next_request(self, teacher: str) -> BacklogRequest | None:
        """Removes and returns the oldest request; None without any."""
        return self._requests[teacher].popleft() if self._requests[teacher] else None

    def next_leases(self, teacher: str, at_most: int, tokens: float = math.inf) -> list[Lease]:
        """Removes and returns whole leases, the oldest first; none if the phase may take no more.

        They have at most ``at_most`` rollouts, ``tokens`` tokens and ``MESSAGE_BYTES`` in all. The
        first lease is returned whatever its size.
        """
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
        """The samples of so many rollouts are in the queue: the teacher may hold as many more."""
        self._taken[teacher] -= rollouts
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)
