"""Numbers in files that somebody else may have written: those that can be added and shown.

JSON has integers of any length, and Python reads NaN, Infinity and 1e999 in it: one of them in a
sum or as a time would end the command that reads it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
