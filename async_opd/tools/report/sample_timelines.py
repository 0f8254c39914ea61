"""The lives of the samples that a run's trace follows: one in a hundred of the trained ones.

    trace.json ──the last arrow of each sample, pauses of its replica──► SampleTimeline

The moments are clocks' of several processes, in microseconds. A part that would begin before the
part in front of it ends has no length, so that the parts of a life add up to the whole.
"""

from __future__ import annotations

import errno
import json
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from async_opd.core.reports import ADMISSION, ADMIT, GRADE, LEASE
from async_opd.files.foreign import HELD_BYTES, Place, foreign
from async_opd.observability.trace import SLICELESS

WORK, WAIT = "work", "waiting"
ROLLOUT, GRADER, TEACHER, TRAINER = "rollout", "grader", "teacher", "trainer"
SAMPLED, PAUSED = "is sampled", "in a weight sync"
PARTS: Mapping[str, tuple[str, str]] = {
    "waits for a slot": (ROLLOUT, WAIT),
    SAMPLED: (ROLLOUT, WORK),
    PAUSED: (ROLLOUT, WAIT),
    "is graded": (GRADER, WORK),
    "in a teacher's queue": (TEACHER, WAIT),
    "waits for a teacher": (TEACHER, WAIT),
    "is scored": (TEACHER, WORK),
    "in the trainer's queue": (TRAINER, WAIT),
    "waits for the trainer": (TRAINER, WAIT),
    "is trained": (TRAINER, WORK),
}
"""The parts of a life, in order: the place, and whether the sample is worked on or waits."""
Moment = Annotated[int, Field(ge=-(1 << 53), le=1 << 53)]
_LIFE: TypeAdapter[list[tuple[str, str, str, Moment, Moment]]] = TypeAdapter(
    list[tuple[str, str, str, Moment, Moment]]
)
_SLICE: TypeAdapter[tuple[Moment, Moment]] = TypeAdapter(tuple[Moment, Moment])
Span = tuple[int, int]
MOST_PARTS = 1 << 22
"""Of all lives of a trace: each may have all pauses of its replica, in memory of some 130 bytes."""


@dataclass(frozen=True)
class SampleTimeline:
    """``parts`` are (name in ``PARTS``, start, end) in microseconds since the sample's admission.

    Each begins where the one before it ends, and none is empty.
    """

    uid: str
    parts: tuple[tuple[str, int, int], ...]

    @property
    def whole(self) -> int:
        """Microseconds from the admission to the end of the step."""
        return self.parts[-1][2] if self.parts else 0

    def total(self, name: str) -> int:
        """Microseconds of the parts of this name."""
        return sum(end - start for part, start, end in self.parts if part == name)


def read_timelines(path: Place) -> Iterator[SampleTimeline]:
    """The lives of a trace, in the order in which the samples were trained; none without a file.

    A sample that lacks a moment, after a kill, a restart or by an older version, is left out.
    OSError, also for more than ``MOST_PARTS``.
    """
    if not foreign(path).exists():
        return
    threads: dict[tuple[Any, Any], str] = {}
    pauses: defaultdict[str, list[Span]] = defaultdict(list)
    left = MOST_PARTS
    for line in foreign(path).lines(HELD_BYTES):
        if not any(word in line for word in _WORDS):
            continue
        try:
            event = json.loads(line.rstrip(",\n"))
            args, place = event.get("args", {}), (event["pid"], event["tid"])
            if event["name"] == "thread_name":
                threads[place] = str(args["name"])
            elif event["ph"] == "X" and event["cat"] == "rollout":
                start, length = _SLICE.validate_python((event["ts"], event["dur"]))
                earlier = pauses[threads[place]]
                begin = max(start, earlier[-1][1]) if earlier else start
                if start + length > begin:  # else it is within those that are there
                    earlier.append((begin, start + length))
            elif event["ph"] == "f":
                found = _timeline(str(args["uid"]), args["life"], pauses)
                left -= len(found.parts)
                if left < 0:
                    cause = f"says more than {MOST_PARTS} parts of lives"
                    raise OSError(errno.EFBIG, cause, str(path))
                yield found
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue


_WORDS = ('"life"', '"sync"', '"thread_name"')


def _timeline(uid: str, way: object, pauses: Mapping[str, Sequence[Span]]) -> SampleTimeline:
    """ValueError or LookupError for a life that lacks a moment."""
    at: dict[tuple[str, str], Span] = {}
    track = ""
    for pool, what, on, start, end in _LIFE.validate_python(way):
        place, did = pool.partition("/")[0], what if what in SLICELESS else WORK
        at[place, did] = start, end
        track = on if (place, did) == (ROLLOUT, WORK) else track
    sampled = at[ROLLOUT, WORK]
    ends = (
        *sampled,
        sampled[1],  # pauses are cut out of what is sampled
        at.get((ROLLOUT, GRADE), sampled)[1],
        at[TEACHER, LEASE][0],
        *at[TEACHER, WORK],
        at["train", LEASE][0],
        *at["train", WORK],
    )
    begun = now = at[ADMISSION, ADMIT][0]
    parts: list[tuple[str, int, int]] = []
    for name, end in zip(PARTS, ends, strict=True):
        end = max(end, now)
        if name == SAMPLED:
            for start, until in _within(pauses.get(f"{track} sync", ()), now, end):
                parts += [(name, now, start), (PAUSED, start, until)]
                now = until
        parts.append((name, now, end))
        now = end
    kept = ((name, start - begun, end - begun) for name, start, end in parts if end > start)
    return SampleTimeline(uid, tuple(kept))


def _within(pauses: Sequence[Span], start: int, end: int) -> Iterator[Span]:
    """The parts of the pauses, which are in order, between start and end."""
    for begin, until in islice(pauses, max(bisect(pauses, (start, start)) - 1, 0), None):
        begin, until = max(begin, start), min(until, end)
        if begin >= end:
            return
        if until > begin:
            yield begin, until
            start = until
