"""Virtual time, and what waits in it.

Events are in the order of their time; of equal times, the first scheduled first. A topic is that of
``async_opd.queue.topic`` without time and payloads.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar


class Clock:
    """Runs events until ``stop`` or until there are none. No sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._next: list[Callable[[], None]] = []
        self._stopped = False

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedules the call at a moment that is not before now."""
        heapq.heappush(self._events, (when, next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedules the call in so many seconds."""
        self.at(self.now + seconds, call, *arguments)

    def then(self, call: Callable[[], None]) -> None:
        """Schedules the call for the end of the current event."""
        self._next.append(call)

    def stop(self) -> None:
        """Makes the current event the last one."""
        self._stopped = True

    def run(self) -> None:
        """Makes all scheduled calls."""
        events, following = self._events, self._next
        while True:
            while following:
                following.pop()()
            if self._stopped or not events:
                return
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)


class Level:
    """A quantity that changes in steps, and its integral over time."""

    __slots__ = ("_clock", "_moment", "value")

    def __init__(self, clock: Clock) -> None:
        self.value = 0.0
        self._moment = 0.0  # the sum of change · time
        self._clock = clock

    def add(self, change: float) -> None:
        """Changes the value by ``change``, up or down."""
        self.value += change
        self._moment += change * self._clock.now

    @property
    def area(self) -> float:
        """The integral from the start until now: each change counts from its time on."""
        return self.value * self._clock.now - self._moment


Item = TypeVar("Item")


class _SimulatedGetter(NamedTuple, Generic[Item]):
    at_least: int
    at_most: int
    share: bool
    then: Callable[[list[Item]], None]


class SimulatedTopic(Generic[Item]):
    """Bounded by items, ready ones and leased ones together; waiters are served oldest first."""

    def __init__(self, clock: Clock, max_items: int) -> None:
        self.ready = Level(clock)
        """Items that wait for a consumer."""
        self._max_items = max_items
        self._ready: deque[Item] = deque()
        self._leased = 0
        self._putters: deque[tuple[Sequence[Item], Callable[[], None]]] = deque()
        self._getters: deque[_SimulatedGetter[Item]] = deque()

    def put(self, items: Sequence[Item], then: Callable[[], None]) -> None:
        """Appends items and calls ``then``, at once or when there is room."""
        self._putters.append((items, then))
        self._settle()

    def get(
        self, at_least: int, at_most: int, then: Callable[[list[Item]], None], share: bool = False
    ) -> None:
        """Calls ``then`` with the items of a lease, at once or when enough are ready.

        With ``share`` the lease has at most an even share of the ready items among all getters.
        """
        self._getters.append(_SimulatedGetter(at_least, at_most, share, then))
        self._settle()

    def ack(self, count: int) -> None:
        """Removes ``count`` leased items."""
        self._leased -= count
        self._settle()

    def _settle(self) -> None:
        """Serves waiters until none can go on; the callbacks may call this again."""
        while True:
            if self._putters and self._has_room(len(self._putters[0][0])):
                self._serve_putter()
            elif self._getters and len(self._ready) >= self._getters[0].at_least:
                self._serve_getter()
            else:
                return

    def _serve_putter(self) -> None:
        items, then = self._putters.popleft()
        self._ready.extend(items)
        self.ready.add(len(items))
        then()

    def _serve_getter(self) -> None:
        getter = self._getters.popleft()
        count = min(getter.at_most, len(self._ready))
        if getter.share:
            even = -(-len(self._ready) // (1 + len(self._getters)))
            count = min(count, max(getter.at_least, even))
        lease = [self._ready.popleft() for _ in range(count)]
        self.ready.add(-count)
        self._leased += count
        getter.then(lease)

    def _has_room(self, count: int) -> bool:
        held = len(self._ready) + self._leased
        if held == 0 or held + count <= self._max_items:
            return True
        return bool(self._getters) and len(self._ready) < self._getters[0].at_least
