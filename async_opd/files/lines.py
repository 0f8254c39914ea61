"""Files of lines that only grow: how they are written, and read as JSON objects.

A line is in the file as a whole or not at all.

A kill or a full disk may tear the last line. The next writer cuts the torn part off first
(``whole_lines``): a line appended to it would be unreadable too.

Readers of metrics, dead letters and the journal meet such a line, which is not an object, at the
end or where a run was continued. Somebody else may have written them: of their numbers those are
read that can be added and shown.

JSON has integers of any length, and Python reads NaN, Infinity and 1e999 in it: one of them in a
sum or as a time would end the command that reads it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from async_opd.files.foreign import RECORD_BYTES, Place, foreign
from async_opd.files.safe_open import regular_file

MOST = 1e300
"""The largest number: the sum of a file's numbers is finite."""
MOST_S = 2.5e11
"""The last moment that has a date, in seconds since the epoch."""

MOST_COUNT = 1 << 53
"""Above every count."""

Count = Annotated[int, Field(ge=0, lt=MOST_COUNT)]
Seconds = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False)]
"""A duration, or a moment since the epoch."""


def number_of(value: object) -> float | None:
    """A number that is finite and at most ``MOST``; None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) <= MOST else None


CHUNK = 1 << 16
"""Bytes that are read at once, from the end."""


def append_line(file: io.RawIOBase, line: bytes) -> None:
    """Writes all of ``line`` at the end of an unbuffered file. OSError: the file is as it was."""
    before = file.seek(0, os.SEEK_END)
    rest = memoryview(line)
    try:
        while rest:
            written = file.write(rest)  # a full disk may take a part without an error
            if not written:
                raise OSError(f"{len(rest)} of {len(line)} bytes were not written: no space left?")
            rest = rest[written:]
    except OSError:
        with suppress(OSError):
            file.truncate(before)
        raise


def end_torn_line(path: Path) -> None:
    """Ends a torn last line with a newline, so that the next line is whole. OSError."""
    if path.exists() and whole_lines(path) < path.stat().st_size:
        with open(path, "ab", buffering=0, opener=regular_file) as file:
            append_line(file, b"\n")


def whole_lines(path: Path, limit: int | None = None) -> int:
    """Bytes of the whole lines within a file's first ``limit`` bytes; 0 for no file. OSError."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            size = file.seek(0, os.SEEK_END)
            end = size if limit is None else min(size, limit)
            while end > 0:
                start = max(0, end - CHUNK)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
    except FileNotFoundError:
        pass
    return 0


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
