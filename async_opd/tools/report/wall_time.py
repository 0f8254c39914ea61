"""The wall time of a run: that of its parts, without the time between two of them.

origin.json, run.log, metrics.jsonl ──► parts ──► seconds of the run at a moment
                                          └─────► phases of each part
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from async_opd.files.origin import read_origins
from async_opd.tools.report.recorded_run import STEP_S, RecordedRun

UP = "everything is up after "
"""Begins the message of ``run.log`` after which the engines serve."""
START_UP, BEFORE, STEPS, END = "start-up", "before the first step", "steps", "end"
PHASES = (START_UP, BEFORE, STEPS, END)


@dataclass(frozen=True)
class Phase:
    """A phase of a part of the run, from 1 on. ``begin`` and ``end`` are seconds of the run."""

    part: int
    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class WallTime:
    """The moments at which each part began and last wrote, in seconds since the epoch."""

    parts: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, run: RecordedRun) -> WallTime:
        """From each part's start to its last message or row."""
        written = (*(one.time for one in run.messages), *(row.time for row in run.rows))
        times = sorted(time for time in written if math.isfinite(time))
        # as messages' times
        found = (origin.time for origin in read_origins(run.folder))
        starts = sorted(math.floor(time) for time in found if time)
        if not times:
            return cls(())
        ends = [*(bisect_left(times, start) for start in starts), len(times)]
        begun = zip([times[0], *starts], [0, *ends[:-1]], ends, strict=True)
        return cls(tuple((begin, times[last - 1]) for begin, first, last in begun if last > first))

    @cached_property
    def _before(self) -> list[float]:
        return list(accumulate((end - begin for begin, end in self.parts), initial=0.0))

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return self._before[-1]

    def part_at(self, moment: float) -> int:
        """The index of the part to which a moment belongs: the last one that has begun by then."""
        return max(bisect_right(self.parts, (moment, math.inf)) - 1, 0)

    def at(self, moment: float) -> float:
        """Seconds of the run until a moment, in seconds since the epoch."""
        if not self.parts:
            return 0.0
        part = self.part_at(moment)
        begin, end = self.parts[part]
        return self._before[part] + max(min(moment, end) - begin, 0.0)

    @property
    def unit(self) -> tuple[str, float]:
        """The unit in which the whole run is a number that is read easily, and its seconds."""
        if self.seconds < 180:
            return "s", 1.0
        return ("min", 60.0) if self.seconds < 10_800 else ("h", 3600.0)


def phases(run: RecordedRun, wall: WallTime) -> Iterator[Phase]:
    """The phases of each part that took time.

    Where ``run.log`` does not say when the engines served, that is taken for start-up which was
    before the first step. The end has the last evaluation, the writing of the student, and steps
    that a resume has undone.
    """
    up, first, last = dict[int, float](), dict[int, float](), dict[int, float]()
    for message in run.messages:
        if message.text.startswith(UP):
            up.setdefault(wall.part_at(message.time), message.time)
    for row in run.steps:
        part = wall.part_at(row.time)
        first.setdefault(part, row.time - row.values[STEP_S])
        last[part] = row.time
    for part, (begin, end) in enumerate(wall.parts):
        begins = first.get(part, end)
        moments = [begin, up.get(part, begins), begins, last.get(part, end), end]
        at = [wall.at(min(max(moment, begin), end)) for moment in accumulate(moments, max)]
        for name, since, until in zip(PHASES, at, at[1:], strict=False):
            if until > since:
                yield Phase(part + 1, name, since, until)
