"""When each pool computed, as a picture: Chrome trace events, which https://ui.perfetto.dev opens.

A pool is a process of the trace. Its intervals may overlap (replicas work side by side), which
events of one thread must not, so that a pool has as many threads ("lanes") as overlap at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from async_opd.core.atomic_file import write_atomically
from async_opd.core.stages import Interval

Event = dict[str, Any]


class Trace:
    """Collects intervals by pool. ``start`` (seconds since the epoch) is the trace's time 0."""

    def __init__(self, run_dir: Path, start: float) -> None:
        self.path = run_dir / "trace.json"
        self._start = start
        self._pools: dict[str, list[Interval]] = {}

    def add(self, pool: str, intervals: Iterable[Interval]) -> None:
        """Adds intervals of a pool, in any order."""
        self._pools.setdefault(pool, []).extend(intervals)

    def write(self) -> Path:
        """Writes ``trace.json`` with everything added so far; can be called again later."""
        events = [
            event
            for number, (pool, intervals) in enumerate(self._pools.items(), 1)
            for event in self._events(number, pool, intervals)
        ]
        content = {"traceEvents": events, "displayTimeUnit": "ms"}
        write_atomically(self.path, json.dumps(content))
        return self.path

    def _events(self, number: int, pool: str, intervals: list[Interval]) -> list[Event]:
        """The pool's names, then its intervals. Times are in microseconds."""
        events: list[Event] = [
            _name("process_name", number, 0, pool),
            {
                "name": "process_sort_index",
                "ph": "M",
                "pid": number,
                "args": {"sort_index": number},
            },
        ]
        for lane, own in enumerate(lanes(intervals)):
            events.append(
                _name("thread_name", number, lane, f"{pool} {lane + 1}" if lane else pool)
            )
            events += [
                {
                    "name": interval.what,
                    "cat": pool,
                    "ph": "X",
                    "pid": number,
                    "tid": lane,
                    "ts": round((interval.start - self._start) * 1e6),
                    "dur": round((interval.end - interval.start) * 1e6),
                }
                for interval in own
            ]
        return events


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """The intervals by start, each in the first lane that is free by then."""
    found: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda interval: interval.start):
        for lane in found:
            if lane[-1].end <= interval.start:
                lane.append(interval)
                break
        else:
            found.append([interval])
    return found
