"""Picks the replica for the next piece of work: the one with the fewest outstanding tokens.

    reserve ──► [ waiting, oldest first ] ──room──► place on the least loaded replica ──► release

Each replica holds at most ``max_in_flight`` pieces of work; the rest waits here. Members that serve
get work, those that are ejected or rebuilt get none, while work goes on. Decisions are local and
take O(log replicas): no remote call, no lock, one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from async_opd.core.bounded import BoundedDict
from async_opd.core.errors import NoReplica
from async_opd.processes.events import Event, State
from async_opd.processes.members import Member, MemberSet

Replica = TypeVar("Replica")

REMEMBERED_KEYS = 8192
"""Keys whose replica is remembered; the oldest is forgotten first."""


@dataclass(slots=True)
class _MemberLoad(Generic[Replica]):
    """What an incarnation of a member has in flight; ``sequence`` is its valid heap entry's."""

    member: Member[Replica]
    max_in_flight: int
    incarnation: int = 0
    tokens: int = 0
    in_flight: int = 0
    sequence: int = 0

    @property
    def has_room(self) -> bool:
        return self.member.state is State.SERVING and self.in_flight < self.max_in_flight


@dataclass(slots=True, eq=False)
class Reservation(Generic[Replica]):
    """A place on a member, until it is released."""

    member: Member[Replica]
    tokens: int
    _load: _MemberLoad[Replica] = field(repr=False)
    _held: bool = field(default=True, repr=False)

    @property
    def outstanding(self) -> int:
        """Tokens in flight on the place's member, its own included."""
        return self._load.tokens


@dataclass(slots=True)
class _Waiter(Generic[Replica]):
    tokens: int
    key: Hashable | None
    future: asyncio.Future[Reservation[Replica]]


class Balancer(Generic[Replica]):
    """Counts what each member of a set has in flight."""

    def __init__(self, members: MemberSet[Replica], max_in_flight: int) -> None:
        name = members.name
        if max_in_flight < 1:
            raise ValueError(f"{name}: {max_in_flight} in flight per replica would stop all work")
        self._members = members
        self._max_in_flight = max_in_flight
        self._loads = {member: _MemberLoad(member, max_in_flight) for member in members.all}
        self._heap: list[tuple[int, int, _MemberLoad[Replica]]] = []
        self._sequence = 0
        self._last_cause = ""
        self._waiters: deque[_Waiter[Replica]] = deque()
        self._preferred: BoundedDict[Hashable, Member[Replica]] = BoundedDict(REMEMBERED_KEYS)
        if not members.all:
            raise self._none_left()
        for load in self._loads.values():
            self._changed(load)
        members.listen(self._follow)

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def reserve(self, tokens: int, key: Hashable | None = None) -> Reservation[Replica]:
        """Takes a place for work of about so many tokens; waits while all members are full.

        Work with an equal ``key`` (rollouts of one prompt) prefers the member that had the last of
        it, as long as that one has at most ``tokens`` more outstanding than the least loaded:
        waiting behind more would cost more than the shared prefill saves. Raises NoReplica.
        """
        if not self._members.left:
            raise self._none_left()
        best = self._best()
        if best is not None:
            return self._place(best, tokens, key)
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
        load = place._load
        load.in_flight -= 1
        load.tokens -= place.tokens
        self._changed(load)
        self._serve()

    def _follow(self, event: Event) -> None:
        """The next incarnation of a member has nothing in flight; without any, waiting work fails.

        Places on a member that is gone, or was rebuilt, stay held by who has them.
        """
        member = self._members[event.member]
        if event.incarnation != self._loads[member].incarnation:
            self._loads[member] = _MemberLoad(member, self._max_in_flight, event.incarnation)
        self._last_cause = event.cause or self._last_cause
        self._changed(self._loads[member])
        self._serve()
        if not self._members.left:
            for waiter in self._waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(self._none_left())
            self._waiters.clear()

    # ── what is going on ───────────────────────────────────────────────────────────────────────

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Tokens in flight on each member that is not gone."""
        return tuple(self._loads[member].tokens for member in self._members.left)

    @property
    def in_flight(self) -> int:
        """Pieces of work in flight on all members."""
        return sum(load.in_flight for load in self._loads.values())

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a place."""
        return sum(not waiter.future.done() for waiter in self._waiters)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────

    def _place(
        self, load: _MemberLoad[Replica], tokens: int, key: Hashable | None
    ) -> Reservation[Replica]:
        if key is not None:
            load = self._by_affinity(load, tokens, key)
        load.in_flight += 1
        load.tokens += tokens
        self._changed(load)
        return Reservation(load.member, tokens, load)

    def _by_affinity(
        self, best: _MemberLoad[Replica], tokens: int, key: Hashable
    ) -> _MemberLoad[Replica]:
        liked = self._loads[self._preferred.get(key, best.member)]
        if not liked.has_room or liked.tokens - best.tokens > tokens:
            liked = best
        self._preferred[key] = liked.member
        return liked

    def _best(self) -> _MemberLoad[Replica] | None:
        """The load with room and the fewest tokens; of equals, the one unchanged for longest."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].sequence:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _changed(self, load: _MemberLoad[Replica]) -> None:
        """Replaces the load's entry in the heap; the old one is dropped when it comes up."""
        load.sequence = 0
        if load.has_room and self._loads[load.member] is load:
            self._sequence += 1
            load.sequence = self._sequence
            heapq.heappush(self._heap, (load.tokens, self._sequence, load))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].sequence]
            heapq.heapify(self._heap)

    def _serve(self) -> None:
        """Gives room to who waits, oldest first."""
        while self._waiters and (best := self._best()) is not None:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_result(self._place(best, waiter.tokens, waiter.key))

    def _none_left(self) -> NoReplica:
        count, each = len(self._loads), self._max_in_flight
        return NoReplica(
            self._members.name,
            f"all {count} replicas are gone; the last failure: {self._last_cause}"
            if count
            else f"no replica: 0 replicas x {each} in flight each can serve 0 requests",
            "see run.log for what became of each, and Ray's session directory for their logs"
            if count
            else "take at least 1",
        )
