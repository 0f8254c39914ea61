"""The trace of a run: its pools' intervals as Chrome trace events, for https://ui.perfetto.dev.

    reports' intervals ──busy──► a thread ──► trace.json, complete JSON after every write

A pool is a process of the trace. Its intervals may overlap (replicas work side by side), which
events of one thread must not, so that a pool has as many threads ("lanes") as overlap at once.

The file ends with a tail that closes the JSON and holds the state for the next write. Events are
written over the tail, with the next tail behind them, in one write. Times are the wall clock's, so
that the events after ``--resume``, or after a rewind, come after those before.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_opd.core.reports import Interval
from async_opd.files.safe_open import regular_file, write_atomically
from async_opd.observability.sinks import Sink, Summary
from async_opd.processes.background import BackgroundWorker

Event = dict[str, Any]
Pools = Mapping[str, Sequence[Interval]]

MAX_INTERVALS = 500_000
"""About 50 MiB. Later intervals are counted in the file and dropped."""
MAX_WAITING = 100_000
"""Intervals that may wait for the disk."""
CLOSE_S = 10.0
"""Seconds that the end of the run waits for the disk."""

HEAD = '{"displayTimeUnit": "ms", "traceEvents": [\n'
TAIL = '\n], "otherData": '
TAIL_BYTES = 1 << 16


class TraceSink(Sink):
    """Writes ``trace.json`` of a run directory; with ``resumed`` appends to an existing one."""

    name = "trace"

    def __init__(
        self,
        run_dir: Path,
        clock: Callable[[], float] = time.time,
        resumed: bool = False,
        max_intervals: int = MAX_INTERVALS,
    ) -> None:
        self.path = run_dir / "trace.json"
        self._clock = clock
        self._resumed = resumed
        self._max_intervals = max_intervals
        self._behind = 0
        self._writer = BackgroundWorker("trace", self._write, MAX_WAITING, _count)

    def start(self) -> str | None:
        """Opens the file. OSError if it cannot be written."""
        note = None
        if self._resumed and self.path.is_file():
            try:
                self._file = _TraceFile.again(self.path)
                return None
            except (ValueError, TypeError, LookupError) as error:
                note = f"trace.json begins anew: the existing one cannot be continued ({error})"
        self._file = _TraceFile.new(self.path, self._clock())
        return note

    def busy(self, pools: Pools) -> None:
        """Passes the intervals to the writing thread. Raises the error of its last write."""
        if not self._writer.put(pools):
            self._behind += _count(pools)

    def close(self, summary: Summary) -> str | None:
        """Closes the file within ``CLOSE_S``; a message if intervals are missing in it."""
        if not self._writer.close(CLOSE_S):
            return f"trace.json is incomplete: its disk did not answer for {CLOSE_S:g} s"
        state = self._file.state
        if self._behind:
            state.left_out += self._behind
            self._file.append([])
        self._file.close()
        if not state.left_out:
            return None
        return f"trace.json has {state.intervals} intervals; {state.left_out} were dropped"

    def _write(self, waiting: list[Pools]) -> None:
        for pools in waiting:
            self._file.append(list(self._events(pools)))

    def _events(self, pools: Pools) -> Iterator[Event]:
        file, state = self._file, self._file.state
        for pool, intervals in pools.items():
            room = max(self._max_intervals - state.intervals, 0)
            taken = sorted(intervals, key=lambda interval: interval.start)[:room]
            yield from file.events(pool, taken)
            left = len(intervals) - len(taken)
            if left and not state.left_out:
                yield _end_of_room(file.ts(intervals[0].start))
            state.intervals += len(taken)
            state.left_out += left


def _count(pools: Pools) -> int:
    return sum(map(len, pools.values()))


@dataclass
class _State:
    """The state in the tail: the trace's time 0 (seconds since the epoch), and counts."""

    start: float
    pools: list[str] = field(default_factory=list)
    intervals: int = 0
    left_out: int = 0


class _TraceFile:
    """A file that is complete JSON between two writes."""

    def __init__(self, file: int, end: int, empty: bool, state: _State) -> None:
        self.state = state
        self._file = file
        self._end = end  # where the tail begins
        self._empty = empty
        self._lanes: dict[str, Lanes] = {}

    @classmethod
    def new(cls, path: Path, start: float) -> _TraceFile:
        """A file without events, in place of an existing one."""
        state = _State(start)
        write_atomically(path, HEAD + _tail(state), durable=False)
        return cls(regular_file(str(path), os.O_RDWR), len(HEAD), True, state)

    @classmethod
    def again(cls, path: Path) -> _TraceFile:
        """An existing file. OSError; ValueError, TypeError or LookupError if it is damaged."""
        file = regular_file(str(path), os.O_RDWR)
        size = os.fstat(file).st_size
        last = os.pread(file, TAIL_BYTES, max(size - TAIL_BYTES, 0))
        at = last.rfind(TAIL.encode())
        if at < 0:
            os.close(file)
            raise ValueError("its end is missing")
        state = _State(**json.loads(last[at + len(TAIL) :].rstrip()[:-1]))
        end = size - len(last) + at
        return cls(file, end, end <= len(HEAD), state)

    def append(self, events: list[Event]) -> None:
        """Writes events over the tail, and the tail behind them. OSError leaves the old content."""
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        if lines and not self._empty:
            lines = ",\n" + lines
        try:
            self._put(lines + _tail(self.state))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
                self._put(_tail(self.state))
            raise
        self._end += len(lines)
        self._empty = self._empty and not lines

    def _put(self, text: str) -> None:
        """Writes ASCII text at the end of the events."""
        data, at = memoryview(text.encode("ascii")), self._end
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def close(self) -> None:
        """Closes the file; ``again`` can open it."""
        os.close(self._file)

    def ts(self, moment: float) -> int:
        """The moment in microseconds since the trace's time 0."""
        return round((moment - self.state.start) * 1e6)

    def events(self, pool: str, intervals: list[Interval]) -> Iterator[Event]:
        """The events of intervals sorted by start, each name's own event before its first use."""
        if pool not in self.state.pools:
            self.state.pools.append(pool)
        number = self.state.pools.index(pool) + 1
        if pool not in self._lanes:
            self._lanes[pool] = Lanes()
            yield _named("process_name", number, 0, pool)
            yield {
                "name": "process_sort_index",
                "ph": "M",
                "pid": number,
                "args": {"sort_index": number},
            }
        lanes = self._lanes[pool]
        known = lanes.count
        for lane, interval in lanes.assign(intervals):
            if lane >= known:
                known = lane + 1
                yield _named("thread_name", number, lane, f"{pool} {lane + 1}" if lane else pool)
            yield {
                "name": interval.what,
                "cat": pool,
                "ph": "X",
                "pid": number,
                "tid": lane,
                "ts": self.ts(interval.start),
                "dur": round((interval.end - interval.start) * 1e6),
            }


def _tail(state: _State) -> str:
    return TAIL + json.dumps(asdict(state)) + "}\n"


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _end_of_room(ts: int) -> Event:
    name = "intervals are dropped from here on; otherData.left_out counts them"
    return {"name": name, "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": ts}


class Lanes:
    """Assigns each interval of a pool to a lane in which no other interval overlaps it.

    Intervals come in several calls; those of a later call may begin before those of an earlier one.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []

    @property
    def count(self) -> int:
        """Lanes in use so far."""
        return len(self._ends)

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
