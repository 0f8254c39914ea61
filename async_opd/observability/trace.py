"""The trace of a run: the work of each process, as Chrome trace events for https://ui.perfetto.dev.

    reports' intervals ──busy──► a thread ──► trace.json, complete JSON after every write

A pool is a process of the trace, each of its replicas and ranks a thread.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from async_opd.core.reports import Interval
from async_opd.observability.sinks import Sink, Summary
from async_opd.observability.trace_events import Event, SampleFlows
from async_opd.observability.trace_file import TraceFile
from async_opd.processes.background import BackgroundWorker

Pools = Mapping[str, Sequence[Interval]]

TRACE = "trace.json"
MAX_BYTES = 64 << 20
"""Longest file; Perfetto opens it at once. Later intervals are counted in the file and dropped."""
MAX_WAITING = 100_000
"""Intervals that may wait for the disk."""
CLOSE_S = 10.0
"""Seconds that the end of the run waits for the disk."""


class TraceSink(Sink):
    """Writes ``trace.json`` of a run directory; with ``resumed`` appends to an existing one."""

    name = "trace"

    def __init__(
        self,
        run_dir: Path,
        clock: Callable[[], float] = time.time,
        resumed: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.path = run_dir / TRACE
        self._clock = clock
        self._resumed = resumed
        self._max_bytes = max_bytes
        self._behind = 0
        self._flows = SampleFlows()
        self._writer = BackgroundWorker("trace", self._write, MAX_WAITING, _count)

    def start(self) -> str | None:
        """Opens the file. OSError if it cannot be written."""
        note = None
        if self._resumed and self.path.is_file():
            try:
                self._file = TraceFile.again(self.path)
                return None
            except (ValueError, TypeError, LookupError) as error:
                note = f"trace.json begins anew: the existing one cannot be continued ({error})"
        self._file = TraceFile.new(self.path, self._clock())
        return note

    def busy(self, pools: Pools) -> None:
        """Passes the intervals to the writing thread. Raises the error of its last write."""
        if (count := _count(pools)) and not self._writer.put(pools):
            self._behind += count

    def close(self, summary: Summary) -> str | None:
        """Closes the file within ``CLOSE_S``; a message if intervals are missing in it."""
        if not self._writer.close(CLOSE_S):
            return f"trace.json is incomplete: its disk did not answer for {CLOSE_S:g} s"
        state = self._file.state
        if self._behind:
            state.left_out += self._behind
            self._file.append([], self._max_bytes)
        self._file.close()
        if not state.left_out:
            return None
        return f"trace.json has {state.intervals} intervals; {state.left_out} events were dropped"

    def _write(self, waiting: list[Pools]) -> None:
        for pools in waiting:
            if events := list(self._events(pools)):
                self._file.append(events, self._max_bytes)

    def _events(self, pools: Pools) -> Iterator[Event]:
        """Slices first: an arrow needs those that it leads from and to."""
        ways = []
        for pool, intervals in pools.items():
            tracks: defaultdict[str, list[Interval]] = defaultdict(list)
            for interval in intervals:
                if not interval.sample:
                    tracks[interval.track].append(interval)
                elif way := self._flows.add(pool, interval):
                    ways.append(way)
            for track, own in tracks.items():
                yield from self._file.slices(pool, track, own)
        for way in ways:
            yield from self._file.arrows(way)


def _count(pools: Pools) -> int:
    return sum(map(len, pools.values()))
