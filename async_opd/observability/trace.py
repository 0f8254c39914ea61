"""The trace of a run: the work of each process, as Chrome trace events for https://ui.perfetto.dev.

    reports' intervals ──busy──► a thread ──► trace.json, complete JSON after every write

A pool is a process of the trace, each of its replicas and ranks a thread.

    pool ─► process        replica or rank ─► its thread        what overlaps there ─► more threads

The way of one sample in ``TRACED`` is drawn as arrows: the slice in which it was generated ──► that
in which it was scored ──► its step. The arrows are written together when the sample is trained:
no arrow begins that does not end. The last one has all that is known of the sample's life.

The file ends with a tail that closes the JSON and holds the state for the next write. Events are
written over the tail, with the next tail behind them, in one write. Times are the wall clock's, so
that the events after ``--resume``, or after a rewind, come after those before.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_opd.core.reports import ADMIT, GRADE, LEASE, Interval
from async_opd.files.safe_open import regular_file, write_atomically
from async_opd.observability.sinks import Sink, Summary
from async_opd.processes.background import BackgroundWorker

Pools = Mapping[str, Sequence[Interval]]

TRACE = "trace.json"
MAX_BYTES = 64 << 20
"""Longest file; Perfetto opens it at once. Later intervals are counted in the file and dropped."""
MAX_WAITING = 100_000
"""Intervals that may wait for the disk."""
CLOSE_S = 10.0
"""Seconds that the end of the run waits for the disk."""
Event = dict[str, Any]
MAX_PENDING = 10_000
"""Traced samples that are not trained yet; the oldest ones are forgotten."""
SLICELESS = (ADMIT, LEASE, GRADE)
"""Parts of a sample's way that are not slices of a thread: no arrow leads to them."""
HEAD = '{"displayTimeUnit": "ms", "traceEvents": [\n'
TAIL = '\n], "otherData": '
TAIL_BYTES = 1 << 20


@dataclass
class State:
    """The state in the tail: the trace's time 0 (seconds since the epoch), names, and counts.

    ``threads`` are the names of each pool's threads, in their order.
    """

    start: float
    threads: dict[str, list[str]] = field(default_factory=dict)
    intervals: int = 0
    arrows: int = 0
    left_out: int = 0


class TraceFile:
    """Turns intervals into events, and appends events up to a number of bytes."""

    def __init__(self, file: int, end: int, empty: bool, state: State) -> None:
        self.state = state
        self._file = file
        self._end = end  # where the tail begins
        self._empty = empty
        self._lanes: defaultdict[tuple[str, str], Lanes] = defaultdict(Lanes)
        self._places = {
            (pool, thread): (process, number)
            for process, (pool, threads) in enumerate(state.threads.items(), 1)
            for number, thread in enumerate(threads)
        }

    @classmethod
    def new(cls, path: Path, start: float) -> TraceFile:
        """A file without events, in place of an existing one."""
        state = State(start)
        write_atomically(path, HEAD + _tail(state), durable=False)
        return cls(regular_file(str(path), os.O_RDWR), len(HEAD), True, state)

    @classmethod
    def again(cls, path: Path) -> TraceFile:
        """An existing file. OSError; ValueError, TypeError or LookupError if it is damaged."""
        file = regular_file(str(path), os.O_RDWR)
        size = os.fstat(file).st_size
        last = os.pread(file, TAIL_BYTES, max(size - TAIL_BYTES, 0))
        at = last.rfind(TAIL.encode())
        try:
            if at < 0:
                raise ValueError("its end is missing")
            state = State(**json.loads(last[at + len(TAIL) :].rstrip()[:-1]))
        except BaseException:
            os.close(file)
            raise
        end = size - len(last) + at
        return cls(file, end, end <= len(HEAD), state)

    def append(self, events: Iterable[Event], max_bytes: int) -> None:
        """Writes events over the tail, and the tail behind them. OSError leaves the old content.

        Slices and arrows that would make the file longer than ``max_bytes`` are counted.
        """
        lines, size, way = [], self._end, 0
        for event in events:
            line = json.dumps(event, separators=(",", ":"))
            size += len(line) + 2
            begun = event["ph"] in "tf" and event["id"] == way  # an arrow that begins also ends
            fits = size <= max_bytes and not self.state.left_out
            if fits or event["ph"] == "M" or begun:
                lines.append(line)
                self.state.intervals += event["ph"] == "X"
                way = event["id"] if event["ph"] == "s" else way
                continue
            if not self.state.left_out:
                lines.append(json.dumps(_end_of_room(event["ts"])))
            size -= len(line) + 2
            self.state.left_out += 1
        text = ",\n".join(lines)
        if text and not self._empty:
            text = ",\n" + text
        try:
            self._put(text + _tail(self.state))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
                self._put(_tail(self.state))
            raise
        self._end += len(text)
        self._empty = self._empty and not text

    def _put(self, text: str) -> None:
        """Writes ASCII text at the end of the events."""
        data, at = memoryview(text.encode("ascii")), self._end
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def close(self) -> None:
        """Closes the file; ``again`` can open it."""
        os.close(self._file)

    def slices(self, pool: str, track: str, intervals: list[Interval]) -> Iterator[Event]:
        """The events of a track's intervals, each name's own event before its first use."""
        intervals = sorted(intervals, key=lambda interval: interval.start)
        for lane, interval in self._lanes[pool, track].assign(intervals):
            name = track or pool
            yield from self._naming(pool, thread := f"{name} {lane + 1}" if lane else name)
            process, number = self._places[pool, thread]
            yield complete(interval, pool, process, number, self.state.start)

    def arrows(self, way: list[tuple[str, Interval]]) -> Iterator[Event]:
        """The arrows from each part of a sample's way to the next one."""
        self.state.arrows += 1
        slices = [part for part in way if part[1].what not in SLICELESS]
        for at, (pool, interval) in enumerate(slices):
            yield from self._naming(pool, thread := interval.track or pool)
            kind = "s" if at == 0 else "f" if at == len(slices) - 1 else "t"
            process, number = self._places[pool, thread]
            event = arrow(kind, self.state.arrows, interval, self.state.start)
            if kind == "f":
                event["args"]["life"] = life(way, self.state.start)
            yield event | {"pid": process, "tid": number}

    def _naming(self, pool: str, thread: str) -> Iterator[Event]:
        """The events that name the pool's process and the thread, if none has yet."""
        if (pool, thread) in self._places:
            return
        threads = self.state.threads
        if pool not in threads:
            threads[pool] = []
            number = len(threads)
            yield named("process_name", number, 0, pool)
            yield named("process_sort_index", number, 0, "") | {"args": {"sort_index": number}}
        self._places[pool, thread] = list(threads).index(pool) + 1, len(threads[pool])
        threads[pool].append(thread)
        yield named("thread_name", *self._places[pool, thread], thread)


def _tail(state: State) -> str:
    return TAIL + json.dumps(asdict(state)) + "}\n"


def _end_of_room(ts: int) -> Event:
    name = "slices are dropped from here on; otherData.left_out counts them"
    return {"name": name, "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": ts}


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
