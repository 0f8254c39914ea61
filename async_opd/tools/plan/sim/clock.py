"""Virtual time: events in the order of their time; of equal times, the first scheduled first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


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
