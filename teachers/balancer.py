"""Picks the replica for the next piece of work: the one with the fewest outstanding tokens.

    acquire ──► [ waiting, oldest first ] ──room──► place on the least loaded replica ──► release

Each replica holds at most ``max_in_flight`` pieces of work; the rest waits here. Replicas join,
leave, are ejected and restored while work goes on. Decisions are local and take O(log replicas):
no remote call, no lock, one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from async_opd.core.bounded import BoundedDict
from async_opd.core.errors import NoReplica

Replica = TypeVar("Replica")

REMEMBERED_KEYS = 8192
"""Keys whose replica is remembered; the oldest is forgotten first."""


@dataclass(slots=True)
class _MemberLoad(Generic[Replica]):
    """A replica and what it has in flight; ``sequence`` is its valid heap entry's."""

    replica: Replica
    max_in_flight: int
    tokens: int = 0
    in_flight: int = 0
    ejected: bool = False
    sequence: int = 0

    @property
    def has_room(self) -> bool:
        return not self.ejected and self.in_flight < self.max_in_flight


@dataclass(slots=True, eq=False)
class Reservation(Generic[Replica]):
    """A place on a replica, until it is released."""

    replica: Replica
    tokens: int
    _member: _MemberLoad[Replica] = field(repr=False)
    _held: bool = field(default=True, repr=False)

    @property
    def outstanding(self) -> int:
        """Tokens in flight on the place's replica, its own included."""
        return self._member.tokens


@dataclass(slots=True)
class _Waiter(Generic[Replica]):
    tokens: int
    key: Hashable | None
    future: asyncio.Future[Reservation[Replica]]


class Balancer(Generic[Replica]):
    """Counts what each replica has in flight. Replicas are told apart by equality, and hashable.

    ``name`` is what the errors call the pool.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        max_in_flight: int,
        *,
        name: str = "pool",
    ) -> None:
        self._name = name
        if max_in_flight < 1:
            raise ValueError(f"{name}: {max_in_flight} in flight per replica would stop all work")
        self._max_in_flight = max_in_flight
        self._members: dict[Replica, _MemberLoad[Replica]] = {}
        self._heap: list[tuple[int, int, _MemberLoad[Replica]]] = []
        self._sequence = 0
        self._waiters: deque[_Waiter[Replica]] = deque()
        self._preferred: BoundedDict[Hashable, Replica] = BoundedDict(REMEMBERED_KEYS)
        if not replicas:
            raise self._none_left()
        for replica in replicas:
            self.add(replica)

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def acquire(self, tokens: int, key: Hashable | None = None) -> AsyncIterator[Replica]:
        """Holds a place on a replica for work of about so many tokens; waits while all are full.

        Work with an equal ``key`` (rollouts of one prompt) prefers the replica that had the last
        of it, as long as that one has at most ``tokens`` more outstanding than the least loaded:
        waiting behind more would cost more than the shared prefill saves. Raises NoReplica.
        """
        place = await self.reserve(tokens, key)
        try:
            yield place.replica
        finally:
            self.release(place)

    async def reserve(self, tokens: int, key: Hashable | None = None) -> Reservation[Replica]:
        """Like ``acquire``, for callers that cannot use a block: they must ``release``."""
        if not self._members:
            raise self._none_left()
        member = self._best()
        if member is not None:
            return self._place(member, tokens, key)
        future: asyncio.Future[Reservation[Replica]] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(tokens, key, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.release(future.result())
            raise

    def release(self, place: Reservation[Replica]) -> None:
        """Gives the place back; a second time does nothing."""
        if not place._held:
            return
        place._held = False
        member = place._member
        member.in_flight -= 1
        member.tokens -= place.tokens
        self._changed(member)
        self._serve()

    # ── replicas ───────────────────────────────────────────────────────────────────────────────

    def add(self, replica: Replica) -> None:
        """A replica joins, and takes waiting work at once."""
        if replica in self._members:
            raise ValueError(f"{self._name}: {replica!r} is a member already")
        self._members[replica] = member = _MemberLoad(replica, self._max_in_flight)
        self._changed(member)
        self._serve()

    def remove(self, replica: Replica) -> None:
        """A replica leaves for good. Its places stay held by who has them, and count no more.

        Without any replica left, everything that waits raises NoReplica.
        """
        member = self._members.pop(replica)
        member.ejected = True
        member.sequence = 0
        if not self._members:
            for waiter in self._waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(self._none_left())
            self._waiters.clear()

    def eject(self, replica: Replica) -> None:
        """The replica gets no more work until it is restored; waiting work stays waiting."""
        self._members[replica].ejected = True
        self._changed(self._members[replica])

    def restore(self, replica: Replica) -> None:
        """An ejected replica serves again."""
        self._members[replica].ejected = False
        self._changed(self._members[replica])
        self._serve()

    # ── what is going on ───────────────────────────────────────────────────────────────────────

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All members, ejected ones included, in the order in which they joined."""
        return tuple(self._members)

    @property
    def serving(self) -> int:
        """Members that are not ejected."""
        return sum(not member.ejected for member in self._members.values())

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Tokens in flight on each member."""
        return tuple(member.tokens for member in self._members.values())

    @property
    def in_flight(self) -> int:
        """Pieces of work in flight on all members."""
        return sum(member.in_flight for member in self._members.values())

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a place."""
        return sum(not waiter.future.done() for waiter in self._waiters)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────

    def _place(
        self, member: _MemberLoad[Replica], tokens: int, key: Hashable | None
    ) -> Reservation[Replica]:
        if key is not None:
            member = self._by_affinity(member, tokens, key)
        member.in_flight += 1
        member.tokens += tokens
        self._changed(member)
        return Reservation(member.replica, tokens, member)

    def _by_affinity(
        self, best: _MemberLoad[Replica], tokens: int, key: Hashable
    ) -> _MemberLoad[Replica]:
        liked = self._members.get(self._preferred.get(key, best.replica), best)
        if not liked.has_room or liked.tokens - best.tokens > tokens:
            liked = best
        self._preferred[key] = liked.replica
        return liked

    def _best(self) -> _MemberLoad[Replica] | None:
        """The member with room and the fewest tokens; of equals, the one unchanged for longest."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].sequence:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _changed(self, member: _MemberLoad[Replica]) -> None:
        """Replaces the member's entry in the heap; the old one is dropped when it comes up."""
        if member.replica not in self._members or self._members[member.replica] is not member:
            return
        member.sequence = 0
        if member.has_room:
            self._sequence += 1
            member.sequence = self._sequence
            heapq.heappush(self._heap, (member.tokens, self._sequence, member))
        if len(self._heap) > 64 + 4 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].sequence]
            heapq.heapify(self._heap)

    def _serve(self) -> None:
        """Gives room to who waits, oldest first."""
        while self._waiters and (member := self._best()) is not None:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_result(self._place(member, waiter.tokens, waiter.key))

    def _none_left(self) -> NoReplica:
        return NoReplica(
            self._name,
            f"no replica: 0 replicas x {self._max_in_flight} in flight each can serve 0 requests",
            "see the messages before this one for why replicas left, and take at least 1",
        )
