"""The answers of the pipeline's stages: reports, events, progress and written files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # numpy: a config is read without it
    from async_opd.core.samples import Header

LEASE = "lease"
"""The event of a sample at the moment at which a consumer takes it from the queue."""
ADMISSION, ADMIT, GRADE = "admission", "admit", "grade"
"""The track of admissions, and the events of a sample's admission and of its grading."""

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk: its size in bytes, and its SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Interval:
    """A pool was busy from ``start`` to ``end`` (seconds since the epoch) doing ``what``.

    ``track`` names the replica or rank that did it ('' for the pool as a whole), ``sample`` the uid
    of the one sample that it was done for, if it is one of those that the trace follows.
    """

    what: str
    start: float
    end: float
    track: str = ""
    sample: str = ""


@dataclass(frozen=True)
class Progress:
    """``tokens`` computed since some moment; only differences mean anything.

    ``most`` bounds the tokens that the work under way may still compute: prompts and
    ``max_tokens``. ``unresponsive`` are the stages or replicas without an answer, with the error.
    """

    tokens: int
    most: int = 0
    unresponsive: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class StageReport:
    """The work of a stage since its last report.

    ``counters`` are sums since the last report, ``gauges`` the values now, ``busy`` the intervals
    in which the pool computed, ``waits_for`` what it waits for now ('' if it computes). ``spans``
    are further intervals, which only the trace shows: they count in no busy share.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    busy: tuple[Interval, ...] = ()
    waits_for: str = ""
    spans: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class Events:
    """Messages for ``run.log``. ``seen`` is the number to ask with for those that come next."""

    seen: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    ``trained`` are the headers of the batch, ``staleness`` each sample's, in weight versions;
    ``requeued`` is the number of samples that were too stale for it and went to topic ``stale``;
    ``skipped`` is the reason why the batch changed no weights, '' if it did; ``notes`` are lines
    for the run's log. ``computed`` is when the learner computed it.
    """

    step: int
    trained: tuple[Header, ...]
    staleness: tuple[int, ...]
    metrics: Mapping[str, float]
    requeued: int = 0
    skipped: str = ""
    notes: tuple[str, ...] = ()
    computed: Interval | None = None


@dataclass(frozen=True)
class Captured:
    """A copy of the trainer's state is taken, after ``step`` steps; it has ``nbytes``.

    ``report`` is that last step's, whose answer may have been lost; None if this trainer has made
    no step yet.
    """

    step: int
    report: StepReport | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class SyncReport:
    """One weight sync: the new version, bytes sent to each replica, seconds of each part."""

    version: int
    metrics: Mapping[str, float]
