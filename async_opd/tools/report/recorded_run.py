"""Reads the directory of a run, which may be over, be interrupted, or be running now.

    config.yaml   metrics.jsonl   run.log   summary.json   dead_letters.jsonl   roll_backs.json
    ─────────────────────────────── read_recorded_run ───────────────────────────────► RecordedRun
    trace.json ─────────────────────── when it is asked for its lives ──────────────────────┘

A file that a run of its age does not have yet is empty here, and a line that a kill has torn is
left out. A resumed run cuts its metrics to the step at which it goes on, so that every step is
there once; ``run.log`` has the messages of all parts.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from async_opd.accounting.audit import Audit, audit
from async_opd.accounting.lineage import RollBack, read_roll_backs
from async_opd.config.load import load_recorded_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Problem
from async_opd.files.foreign import HELD_BYTES, ForeignPath, Place, foreign
from async_opd.files.lines import (
    Count,
    MetricsRow,
    Seconds,
    json_object,
    json_objects,
    metrics_rows,
    number_of,
)
from async_opd.files.run_format import refuse_no_run
from async_opd.observability.live.live_file import read_live
from async_opd.observability.run_log import DEAD_LETTERS, METRICS, RUN_LOG, SUMMARY
from async_opd.observability.sinks import Status, Summary
from async_opd.observability.trace import TRACE
from async_opd.processes.run_lock import is_locked
from async_opd.tools.report.sample_timelines import SampleTimeline, read_timelines

STEP_S = "perf/step_s"
"""The metric that every row of a training step has, and no other row."""
EVALUATIONS = ("eval/", "eval_initial/", "eval_teacher/")
_STAMPED = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[+-]\d\d:\d\d)?)\s(?:WARNING |ERROR )?(.*)", re.DOTALL
)


@dataclass(frozen=True)
class Message:
    """A line of ``run.log`` with those indented below it. ``time`` is seconds since the epoch."""

    time: float
    text: str


@dataclass(frozen=True)
class _Ended:
    """Fields of ``summary.json`` beside metrics."""

    status: Status
    seconds: Seconds
    error: str | None = None
    steps: Count = 0


_ENDED = TypeAdapter(_Ended)


@dataclass(frozen=True)
class RecordedDeadLetter:
    """A line of ``dead_letters.jsonl``: a sample that will never be trained, and why."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    time: Seconds
    uid: str
    teacher: str
    tokens: Count
    stage: str
    reason: str


_LETTER = TypeAdapter(RecordedDeadLetter)


@dataclass(frozen=True)
class RecordedRun:
    """The files of a run directory. ``summary`` is None while the run is running, or if killed.

    ``left_out`` are keys of an older version's config that this version cannot read.
    """

    folder: ForeignPath
    config: RunConfig
    rows: tuple[MetricsRow, ...]
    messages: tuple[Message, ...]
    summary: Summary | None
    dead_letters: tuple[RecordedDeadLetter, ...]
    roll_backs: tuple[RollBack, ...]
    left_out: tuple[Problem, ...] = ()

    @cached_property
    def steps(self) -> tuple[MetricsRow, ...]:
        """The rows of training steps, in order."""
        return tuple(row for row in self.rows if STEP_S in row.values)

    @cached_property
    def evaluations(self) -> tuple[MetricsRow, ...]:
        """The rows of evaluations, of the student or of its teachers."""
        return tuple(row for row in self.rows if any(k.startswith(EVALUATIONS) for k in row.values))

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every metric that some row has."""
        return frozenset(self._having)

    @cached_property
    def _having(self) -> Mapping[str, list[MetricsRow]]:
        """The rows of each metric: a search for each would take rows times metrics."""
        found = defaultdict[str, list[MetricsRow]](list)
        for row in self.rows:
            for key in row.values:
                found[key].append(row)
        return found

    @property
    def pools(self) -> tuple[str, ...]:
        """``rollout``, ``teacher/<name>`` of each teacher, and ``train``."""
        return ("rollout", *(f"teacher/{name}" for name in self.config.teachers), "train")

    @cached_property
    def status(self) -> str:
        """The summary's status; without one ``running`` or ``killed``, by the run lock.

        ``running or killed`` where the lock says nothing: in a copy, of a run on another machine,
        and on a file system without locks.
        """
        if self.summary:
            return self.summary.status
        live = read_live(self.folder)
        locked = is_locked(Path(str(self.folder))) if live and live.is_here else None
        return {True: "running", False: "killed", None: "running or killed"}[locked]

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each row that has the metric."""
        return [(row.step, row.values[key]) for row in self._having.get(key, ())]

    def timed(self, key: str) -> list[tuple[float, float]]:
        """(time since the epoch, value) of each row that has the metric."""
        return [(row.time, row.values[key]) for row in self._having.get(key, ())]

    @cached_property
    def timelines(self) -> tuple[SampleTimeline, ...]:
        """The timelines of the trained samples that the trace follows. OSError."""
        return tuple(read_timelines(self.folder / TRACE))

    def audit(self) -> Audit:
        """The outcome of each admitted sample. AuditError without a readable journal."""
        return audit(self.folder)


def read_recorded_run(place: Place, overrides: Sequence[str] = ()) -> RecordedRun:
    """Reads a run directory, with overrides of its config.

    ConfigError if it is none, or one of another format, or a config that is not valid; OSError.
    """
    folder = foreign(place)
    refuse_no_run(folder)
    config, left_out = load_recorded_config(folder / "config.yaml", overrides)
    metrics = folder / METRICS
    rows = (row for _, row in metrics_rows(metrics, HELD_BYTES)) if metrics.exists() else ()
    return RecordedRun(
        folder=folder,
        config=config,
        rows=tuple(row for row in rows if row is not None),
        messages=tuple(messages(_lines(folder / RUN_LOG))),
        summary=read_summary(folder),
        dead_letters=tuple(_dead_letters(folder / DEAD_LETTERS)),
        roll_backs=tuple(read_roll_backs(folder)),
        left_out=tuple(left_out),
    )


def left_out(problem: Problem) -> str:
    """A sentence on a key that the reader left out of the config."""
    return f"left out of the config, as another version made the run: {problem.where}: " + (
        f"{problem.key}: {problem.message}"
    )


def _lines(path: ForeignPath) -> Iterator[str]:
    if path.exists():
        yield from (line.removesuffix("\n") for line in path.lines(HELD_BYTES))


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """Each message of ``run.log``; a line without a time is a part of the message before it."""
    time, parts = 0.0, list[str]()
    for line in map(_as_text, lines):
        if (stamped := _STAMPED.match(line)) is not None:
            if parts:
                yield Message(time, "\n".join(parts))
            time, parts = _moment(stamped[1]), [stamped[2]]
        elif parts and line.strip():
            parts.append(line)
    if parts:
        yield Message(time, "\n".join(parts))


def _as_text(line: str) -> str:
    """A line of ``log.format: json`` as one of ``text``."""
    entry = json_object(line) if line.startswith("{") else None
    return line if entry is None else f"{entry.get('time')} {entry.get('text')}"


def _moment(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def read_summary(folder: Place) -> Summary | None:
    """``summary.json``; None without one, or if it is not a summary."""
    try:
        content: dict[str, Any] = dict(json.loads((foreign(folder) / SUMMARY).read()))
        ended = _ENDED.validate_python(content)
        return Summary(
            status=ended.status,
            error=ended.error,
            steps=ended.steps,
            seconds=ended.seconds,
            run_dir=foreign(folder).root,
            metrics=_numbers(content),
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _numbers(content: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a summary, whose names have a slash."""
    found = ((key, number_of(value)) for key, value in content.items() if "/" in key)
    return {key: value for key, value in found if value is not None}


def _dead_letters(path: ForeignPath) -> Iterator[RecordedDeadLetter]:
    for _, entry in json_objects(path, HELD_BYTES) if path.exists() else ():
        try:
            yield _LETTER.validate_python(entry)
        except ValidationError:  # no object, or one with other fields
            continue
