"""The tracks of a trace, the samples whose way is drawn, and the events of both.

    pool ─► process        replica or rank ─► its thread        what overlaps there ─► more threads

The way of one sample in ``TRACED`` is drawn as arrows: the slice in which it was generated ──► that
in which it was scored ──► its step. The arrows are written together when the sample is trained:
no arrow begins that does not end. The last one has all that is known of the sample's life.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from async_opd.core.reports import LEASE, Interval

Event = dict[str, Any]
MAX_PENDING = 10_000
"""Traced samples that are not trained yet; the oldest ones are forgotten."""
ADMISSION, ADMIT, GRADE = "admission", "admit", "grade"
SLICELESS = (ADMIT, LEASE, GRADE)
"""Parts of a sample's way that are not slices of a thread: no arrow leads to them."""


class SampleFlows:
    """Collects the intervals of traced samples until they are trained."""

    def __init__(self) -> None:
        self._pending: OrderedDict[str, dict[tuple[str, str], Interval]] = OrderedDict()

    def add(self, pool: str, interval: Interval) -> list[tuple[str, Interval]]:
        """The way of a sample that is trained now, by time; empty before, or if nothing is known.

        A sample that was generated again, as it was too stale, comes from its last generation.
        """
        uid = interval.sample
        way = self._pending.setdefault(uid, {})
        way[pool, interval.what] = interval
        self._pending.move_to_end(uid)
        if pool != "train" or interval.what == LEASE:
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
            return []
        del self._pending[uid]
        known = [(of, one) for (of, _), one in way.items() if one.end <= interval.end]
        known.sort(key=lambda part: part[1].end)
        return known if sum(one.what not in SLICELESS for _, one in known) > 1 else []


def named(kind: str, process: int, thread: int, name: str) -> Event:
    """The event that names a process or a thread."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def complete(interval: Interval, pool: str, process: int, thread: int, start: float) -> Event:
    """The event of an interval; ``start`` is the trace's time 0."""
    return {
        "name": interval.what,
        "cat": pool,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": round((interval.start - start) * 1e6),
        "dur": round((interval.end - interval.start) * 1e6),
    }


def arrow(kind: str, number: int, interval: Interval, start: float) -> Event:
    """A point of a sample's way (``s``, ``t`` or ``f``), in the last microsecond of its interval.

    It belongs to the slice at this time on its thread, which the caller adds.
    """
    first, last = (round((moment - start) * 1e6) for moment in (interval.start, interval.end))
    event: Event = {"name": "sample", "cat": "sample", "ph": kind, "id": number}
    event |= {"ts": max(last - 1, first), "args": {"uid": interval.sample}}
    return event | {"bp": "e"} if kind == "f" else event


def life(way: Sequence[tuple[str, Interval]], start: float) -> list[list[str | int]]:
    """[pool, what, track, start, end] of each part, in microseconds of the trace."""
    return [
        [of, one.what, one.track, *(round((at - start) * 1e6) for at in (one.start, one.end))]
        for of, one in way
    ]


class Lanes:
    """Assigns each interval of a track to a lane in which no other interval overlaps it.

    Intervals come in several calls; those of a later call may begin before those of an earlier one.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []

    def assign(self, intervals: Sequence[Interval]) -> Iterator[tuple[int, Interval]]:
        """The first free lane for each of several intervals, which are sorted by their start.

        O(n log lanes).
        """
        ends = self._ends
        busy = [(end, lane) for lane, end in enumerate(ends)]
        heapq.heapify(busy)
        free: list[int] = []
        for interval in intervals:
            while busy and busy[0][0] <= interval.start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                free.append(len(ends))
                ends.append(0.0)
            lane = heapq.heappop(free)
            ends[lane] = interval.end
            heapq.heappush(busy, (interval.end, lane))
            yield lane, interval
