"""Reads files of JSON objects, one a line: metrics, dead letters, the journal.

A kill may tear a line, which the next writer ends (``async_opd.files.lines``): such a line is not
an object, and stands last or where a run was continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_opd.files.foreign import RECORD_BYTES, Place, foreign
from async_opd.files.numbers import MOST, MOST_COUNT, MOST_S


@dataclass(frozen=True)
class MetricsRow:
    """One line of ``metrics.jsonl``. ``time`` is seconds since the epoch.

    ``values`` has no entry for a metric that was not finite.
    """

    step: int
    time: float
    values: Mapping[str, float]


def json_objects(
    path: Place, most: int = RECORD_BYTES
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each line that is not empty, and its object; None if it is none. OSError.

    ``most``: see ``ForeignPath.lines``.
    """
    return ((line, json_object(line)) for line in _lines(path, most))


def metrics_rows(path: Place, most: int = RECORD_BYTES) -> Iterator[tuple[str, MetricsRow | None]]:
    """Each line of a file of metrics, and its row; None if it is not such a row. OSError."""
    return ((line, metrics_row(line)) for line in _lines(path, most))


def _lines(path: Place, most: int) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in foreign(path).lines(most) if line.strip())


def json_object(line: str) -> dict[str, Any] | None:
    """The object of a line; None if it is none."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None


def metrics_row(line: str) -> MetricsRow | None:
    """The row of a line of metrics; None if it is not such a line."""
    entry = json_object(line)
    if entry is None:
        return None
    try:
        step, time = int(entry.pop("step")), float(entry.pop("time", 0.0))
        values = {key: float(value) for key, value in entry.items() if value is not None}
        values = {key: value for key, value in values.items() if abs(value) <= MOST}
        if not 0 <= step < MOST_COUNT or not 0 <= time <= MOST_S:
            return None
    except (ValueError, LookupError, TypeError, ArithmeticError):
        return None
    return MetricsRow(step, time, values)
