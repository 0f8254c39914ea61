"""The busy intervals of a pool, for busy shares, the overlap metric and the trace; its waits."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from async_opd.core.reports import ADMIT, Interval, StepReport
from async_opd.core.samples import Group, Rollout
from async_opd.core.stages import Log
from async_opd.core.uid import is_traced, rollout_uid


class Activity:
    """Records the intervals in which at least one block of ``busy`` was open.

    Times are seconds since the epoch, so that intervals of several processes can be compared.
    ``cause()`` is one of ``causes``: why nothing is computed, asked when an idle time begins and at
    each ``drain_waits``; all of the time until the next question counts for it.
    """

    def __init__(
        self,
        what: str,
        clock: Callable[[], float] = time.time,
        track: str = "",
        causes: Sequence[str] = (),
        cause: Callable[[], str] = str,
    ) -> None:
        self.clock = clock
        self._waits = dict.fromkeys(causes, 0.0)
        self._cause = cause
        self._idle: tuple[str, float] | None = None
        self.depth = 0
        self._what = what
        self._track = track
        self._since = 0.0
        self._intervals: list[Interval] = []
        self._spans: list[Interval] = []

    @contextmanager
    def busy(self) -> Iterator[float]:
        """Records the block as work of the pool; blocks may overlap. Yields when it began."""
        begun = self.clock()
        if self.depth == 0:
            self._since = begun
            self._count_idle(begun)
        self.depth += 1
        try:
            yield begun
        finally:
            self.depth -= 1
            if self.depth == 0:
                now = self.clock()
                self._intervals.append(self._interval(self._since, now))
                if self._waits:
                    self._idle = self._cause(), now

    def drain(self) -> tuple[Interval, ...]:
        """The intervals since the last call; one that is still open is cut now."""
        if self.depth:
            now = self.clock()
            self._intervals.append(self._interval(self._since, now))
            self._since = now
        intervals, self._intervals = self._intervals, []
        return tuple(intervals)

    def drain_waits(self) -> dict[str, float]:
        """``wait_<cause>_s``: seconds since the last call in which nothing was computed."""
        if self._waits and not self.depth:
            now = self.clock()
            self._count_idle(now)
            self._idle = self._cause(), now
        waits, self._waits = self._waits, dict.fromkeys(self._waits, 0.0)
        return {f"wait_{cause}_s": seconds for cause, seconds in waits.items()}

    def _count_idle(self, now: float) -> None:
        if self._idle is not None:
            cause, since = self._idle
            self._waits[cause] += now - since
            self._idle = None

    def since(self, begun: float) -> Interval:
        """Work of the pool that ends now. Records nothing: call it in a ``busy`` block."""
        return self._interval(begun, self.clock())

    def sampled(self, uid: str, since: float) -> None:
        """Records work on one sample that ends now, in a ``busy`` block, if the trace follows it.

        ``since`` is when it began.
        """
        if is_traced(uid):
            self._spans.append(replace(self.since(since), sample=uid))

    def followed(
        self, what: str, work: Callable[[Rollout], Awaitable[Rollout]]
    ) -> Callable[[Rollout], Awaitable[Rollout]]:
        """``work``, recorded as ``what`` happens to each rollout that the trace follows."""

        async def recorded(rollout: Rollout) -> Rollout:
            since = self.clock()
            done = await work(rollout)
            if is_traced(rollout.uid):
                self._spans.append(Interval(what, since, self.clock(), self._track, rollout.uid))
            return done

        return recorded

    def span(self, what: str, since: float) -> float:
        """Records for the trace that ``what`` began at ``since`` and ends now; its seconds."""
        now = self.clock()
        self._spans.append(Interval(what, since, now, f"{self._track} {what}".strip()))
        return now - since

    def drain_spans(self) -> tuple[Interval, ...]:
        """Intervals for the trace alone, since the last call."""
        spans, self._spans = self._spans, []
        return tuple(spans)

    def _interval(self, start: float, end: float) -> Interval:
        return Interval(self._what, start, end, self._track)


@contextmanager
def traced(log: Log, pool: str, what: str) -> Iterator[None]:
    """Shows the block in the trace, as a slice of ``pool``, if it ends without an error."""
    since = time.time()
    yield
    log.busy({pool: [Interval(what, since, time.time())]})


def admitted(groups: Iterable[Group], now: float) -> list[Interval]:
    """The moment at which each sample of the groups that the trace follows goes to the rollouter.

    Of a sample that is sampled again its life begins again.
    """
    uids = (rollout_uid(group.prompt.uid, member) for group in groups for member in group.members)
    return [Interval(ADMIT, now, now, sample=uid) for uid in uids if is_traced(uid)]


def trained_samples(report: StepReport) -> list[Interval]:
    """The step as work on each of its samples that the trace follows."""
    uids = [header.uid for header in report.trained if is_traced(header.uid)]
    return [replace(report.computed, sample=uid) for uid in uids] if report.computed else []


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
