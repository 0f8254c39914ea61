"""The busy intervals of a pool, from which come busy shares, overlap metric and trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from async_opd.core.reports import Interval


class Activity:
    """Records the intervals in which at least one block of ``busy`` was open.

    Times are seconds since the epoch, so that intervals of several processes can be compared.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.depth = 0
        self._what = what
        self._since = 0.0
        self._intervals: list[Interval] = []

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Records the block as work of the pool; blocks may overlap."""
        if self.depth == 0:
            self._since = self.clock()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self._intervals.append(Interval(self._what, self._since, self.clock()))

    def drain(self) -> tuple[Interval, ...]:
        """The intervals since the last call; one that is still open is cut now."""
        if self.depth:
            now = self.clock()
            self._intervals.append(Interval(self._what, self._since, now))
            self._since = now
        intervals, self._intervals = self._intervals, []
        return tuple(intervals)


def covered(intervals: list[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones, in order."""
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        if merged and interval.start <= merged[-1].end:
            last = merged[-1]
            merged[-1] = Interval(last.what, last.start, max(last.end, interval.end))
        else:
            merged.append(interval)
    return merged


def overlap_s(pools: list[list[Interval]]) -> float:
    """Seconds in which every one of the pools was busy."""
    events: list[tuple[float, int]] = []
    for pool in pools:
        for interval in covered(pool):
            events += [(interval.start, 1), (interval.end, -1)]
    total, busy, since = 0.0, 0, 0.0
    for moment, change in sorted(events):
        if busy == len(pools):
            total += moment - since
        busy += change
        since = moment
    return total
