"""What the teachers of one host hold until it is their turn.

topic rollouts/<teacher> ──lease──► held ──turn──► jobs: leases joined, questions
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from async_opd.core.batch import MESSAGE_BYTES
from async_opd.core.lease import Lease

Question = Callable[[], Awaitable[None]]


class Shift:
    """Leases and questions by teacher. ``wave`` rollouts in all make it full.

    Each teacher holds at most a wave; what is scored counts until its samples are in the queue.
    """

    def __init__(self, teachers: Sequence[str], wave: int) -> None:
        self._wave = wave
        self._leases: dict[str, deque[Lease]] = {name: deque() for name in teachers}
        self._questions: dict[str, deque[Question]] = {name: deque() for name in teachers}
        self._taken = dict.fromkeys(teachers, 0)  # rollouts held, or scored and not in the queue
        self._left: float = math.inf  # rollouts that this shift may still take
        self._changed = asyncio.Condition()

    @property
    def held(self) -> dict[str, int]:
        """Rollouts that wait for their teacher's turn."""
        return {name: sum(len(lease) for lease in leases) for name, leases in self._leases.items()}

    @property
    def longest(self) -> str | None:
        """The teacher with a question, else the one that holds most; None if there is no work."""
        asked = [name for name, questions in self._questions.items() if questions]
        held = self.held
        most = max(held, key=lambda name: held[name])
        return asked[0] if asked else most if held[most] and self._left > 0 else None

    def begin(self) -> None:
        """A shift: it takes what is held now, or a wave, and leaves what comes later."""
        self._left = max(self._wave, sum(self.held.values()))

    def end(self) -> None:
        """It is over."""
        self._left = math.inf

    async def room(self, teacher: str) -> int:
        """Waits until the teacher may hold more; how many."""
        await self._until(lambda: self._taken[teacher] < self._wave)
        return self._wave - self._taken[teacher]

    async def hold(self, teacher: str, lease: Lease) -> None:
        """Rollouts that wait from now on."""
        self._leases[teacher].append(lease)
        self._taken[teacher] += len(lease)
        await self._tell()

    async def ask(self, teacher: str, question: Question) -> None:
        """Work that is not rollouts."""
        self._questions[teacher].append(question)
        await self._tell()

    async def some(self) -> None:
        """Returns when there is work."""
        await self._until(lambda: self.longest is not None)

    async def full(self) -> None:
        """Returns when there is a wave, or a question."""
        await self._until(
            lambda: sum(self.held.values()) >= self._wave or any(self._questions.values())
        )

    def next_question(self, teacher: str) -> Question | None:
        """A question, if there is one."""
        return self._questions[teacher].popleft() if self._questions[teacher] else None

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

    async def out(self, teacher: str, rollouts: int) -> None:
        """Their samples are in the queue."""
        self._taken[teacher] -= rollouts
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, so: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(so)
