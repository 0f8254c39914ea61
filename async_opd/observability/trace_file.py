"""A trace file that is complete JSON between two writes.

It ends with a tail that closes the JSON and holds the state for the next write. Events are written
over the tail, with the next tail behind them, in one write. Times are the wall clock's, so that the
events after ``--resume``, or after a rewind, come after those before.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from async_opd.core.reports import Interval
from async_opd.files.safe_open import regular_file, write_atomically
from async_opd.observability.trace_events import (
    SLICELESS,
    Event,
    Lanes,
    arrow,
    complete,
    life,
    named,
)

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
