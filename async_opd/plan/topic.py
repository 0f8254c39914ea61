"""A topic of the message queue, over numbers of samples: ``async_opd.core.queue`` without time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from async_opd.plan.clock import Clock, Level

Put = Callable[[], None]
Got = Callable[[list[int]], None]


class Topic:
    """Bounded by samples, ready ones and leased ones together; waiters are served oldest first."""

    def __init__(self, clock: Clock, max_samples: int) -> None:
        self.waiting = Level(clock)
        """Samples that are ready."""
        self._max_samples = max_samples
        self._ready: deque[int] = deque()
        self._leased = 0
        self._putters: deque[tuple[Sequence[int], Put]] = deque()
        self._getters: deque[tuple[int, int, Got]] = deque()

    def put(self, samples: Sequence[int], then: Put) -> None:
        """Appends samples and calls ``then``, at once or when there is room."""
        self._putters.append((samples, then))
        self._settle()

    def get(self, at_least: int, at_most: int, then: Got) -> None:
        """Calls ``then`` with the samples of a lease, at once or when enough are ready."""
        self._getters.append((at_least, at_most, then))
        self._settle()

    def ack(self, count: int) -> None:
        """So many leased samples are done with."""
        self._leased -= count
        self._settle()

    def _settle(self) -> None:
        """Serves waiters until none can go on; who is called may come back here."""
        while True:
            if self._putters and self._has_room(len(self._putters[0][0])):
                self._serve_putter()
            elif self._getters and len(self._ready) >= self._getters[0][0]:
                self._serve_getter()
            else:
                return

    def _serve_putter(self) -> None:
        samples, then = self._putters.popleft()
        self._ready.extend(samples)
        self.waiting.add(len(samples))
        then()

    def _serve_getter(self) -> None:
        _, at_most, then = self._getters.popleft()
        lease = [self._ready.popleft() for _ in range(min(at_most, len(self._ready)))]
        self.waiting.add(-len(lease))
        self._leased += len(lease)
        then(lease)

    def _has_room(self, count: int) -> bool:
        held = len(self._ready) + self._leased
        if held == 0 or held + count <= self._max_samples:
            return True
        return bool(self._getters) and len(self._ready) < self._getters[0][0]
