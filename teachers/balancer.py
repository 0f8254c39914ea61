"""Picks the replica for the next call: the one with the fewest outstanding tokens.

    reserve ──► [ waiting, oldest first ] ──room──► reservation on the least loaded ──► release

Each replica has at most ``max_in_flight`` calls; further ones wait in ``Balancer``. Only members in
the state SERVING get work; members may be ejected and rebuilt at any time. A decision is local and
takes O(log replicas): no remote call, no lock, one event loop.
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
"""Number of keys with a preferred replica; the key that was set longest ago is dropped first."""


@dataclass(slots=True)
class _MemberLoad(Generic[Replica]):
    """The calls in flight of one incarnation of a member.

    ``sequence`` is the number of its valid entry in the heap, 0 without one.
    """

    member: Member[Replica]
    max_in_flight: int
    incarnation: int = 0
    tokens: int = 0
    in_flight: int = 0
    sequence: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_room(self) -> bool:
        return self.member.state is State.SERVING and self.in_flight < self.max_in_flight


@dataclass(slots=True, eq=False)
class Reservation(Generic[Replica]):
    """Room for one call on a member, until ``Balancer.release``."""

    member: Member[Replica]
    tokens: int
    _load: _MemberLoad[Replica] = field(repr=False)
    _held: bool = field(default=True, repr=False)

    @property
    def outstanding(self) -> int:
        """Tokens in flight on the same member, those of this reservation included."""
        return self._load.tokens


@dataclass(slots=True)
class _Waiter(Generic[Replica]):
    tokens: int
    key: Hashable | None
    future: asyncio.Future[Reservation[Replica]]


class Balancer(Generic[Replica]):
    """Counts the calls and tokens in flight on each member of a set."""

    def __init__(self, members: MemberSet[Replica], max_in_flight: int) -> None:
        name = members.name
        if max_in_flight < 1:
            raise ValueError(f"{name}: with {max_in_flight} in flight per replica no work is done")
        self._members = members
        self._max_in_flight = max_in_flight
        self._loads = {member: _MemberLoad(member, max_in_flight) for member in members.all}
        self._heap: list[tuple[int, int, _MemberLoad[Replica]]] = []
        self._sequence = 0
        self._last_cause = ""
        self._waiters: deque[_Waiter[Replica]] = deque()
        self._preferred: BoundedDict[Hashable, Member[Replica]] = BoundedDict(REMEMBERED_KEYS)
        if not members.all:
            cause = f"no replica: 0 replicas x {max_in_flight} in flight each can serve 0 requests"
            raise NoReplica(name, cause, "take at least 1")
        for load in self._loads.values():
            self._changed(load)
        members.listen(self._follow)

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def reserve(self, tokens: int, key: Hashable | None = None) -> Reservation[Replica]:
        """Reserves room for a call of about so many tokens; waits while all members are full.

        A call prefers the member that had the last call with its ``key`` (rollouts of one prompt),
        while that member has at most ``tokens`` more outstanding than the least loaded one: a
        longer wait would cost more than the shared prefill saves. Raises NoReplica.
        """
        best = self._best()
        if best is not None:
            return self._place(best, tokens, key)
        if not self._members.left:
            raise self._none_left()
        future: asyncio.Future[Reservation[Replica]] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(tokens, key, future))
        try:
            return await future
        except asyncio.CancelledError:
            # cancelled after ``_serve`` gave it room, and before it could resume
            if future.done() and not future.cancelled() and not future.exception():
                self.release(future.result())
            raise

    def release(self, reservation: Reservation[Replica]) -> None:
        """Ends the reservation; a second call does nothing."""
        if not reservation._held:
            return
        reservation._held = False
        load = reservation._load
        load.in_flight -= 1
        if not load.in_flight:
            load.idle.set()
        load.tokens -= reservation.tokens
        self._changed(load)
        self._serve()

    async def idle(self, member: Member[Replica]) -> None:
        """Returns when no call is in flight on the current incarnation of a member."""
        load = self._loads[member]
        while load.in_flight:
            load.idle.clear()
            await load.idle.wait()

    def _follow(self, event: Event) -> None:
        """Applies an event: a new incarnation has nothing in flight, a member gone gets no work.

        When the last member is gone, waiting calls fail. Reservations on a dead incarnation stay
        valid until their callers release them.
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

    # ── measurements ───────────────────────────────────────────────────────────────────────────

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Tokens in flight on each member that is not gone."""
        return tuple(self._loads[member].tokens for member in self._members.left)

    @property
    def in_flight(self) -> int:
        """Calls in flight on all members, their dead incarnations left out."""
        return sum(load.in_flight for load in self._loads.values())

    @property
    def waiting(self) -> int:
        """Calls that wait for room."""
        return sum(not waiter.future.done() for waiter in self._waiters)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────

    def _place(
        self, load: _MemberLoad[Replica], tokens: int, key: Hashable | None
    ) -> Reservation[Replica]:
        """Reserves room on ``load``, the least loaded, or on the member that ``key`` prefers."""
        if key is not None:
            preferred = self._loads[self._preferred.get(key, load.member)]
            if preferred.has_room and preferred.tokens - load.tokens <= tokens:
                load = preferred
            self._preferred[key] = load.member
        load.in_flight += 1
        load.tokens += tokens
        self._changed(load)
        return Reservation(load.member, tokens, load)

    def _best(self) -> _MemberLoad[Replica] | None:
        """The load with room and the fewest tokens; of equals, the one unchanged for longest."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].sequence:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _changed(self, load: _MemberLoad[Replica]) -> None:
        """Adds the load's new entry to the heap; ``_best`` drops the old one when it comes up.

        A load without room, or of a dead incarnation, gets no entry. Entries that are no longer
        valid are also removed when they outnumber the valid ones by far, which bounds the heap.
        """
        load.sequence = 0
        if load.has_room and self._loads[load.member] is load:
            self._sequence += 1
            load.sequence = self._sequence
            heapq.heappush(self._heap, (load.tokens, self._sequence, load))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].sequence]
            heapq.heapify(self._heap)

    def _serve(self) -> None:
        """Gives room to waiting calls, oldest first."""
        while self._waiters and (best := self._best()) is not None:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_result(self._place(best, waiter.tokens, waiter.key))

    def _none_left(self) -> NoReplica:
        count, last = len(self._loads), self._last_cause
        cause = f"all {count} replicas are gone; the last failure: {last}"
        remedy = "see run.log for the failures of each, and Ray's session directory for their logs"
        return NoReplica(self._members.name, cause, remedy)
