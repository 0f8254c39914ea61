"""A table's entry for a key of another framework.

To           the key has a counterpart here
Together     several keys together give keys here; the framework's function reads them
Meaningless  nothing here corresponds to the key, for the reason given
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Unmapped(ValueError):
    """A value that has no counterpart here; its text says why."""


ABSENT = object()
"""The result of a ``To.value`` for a value that means the default here: nothing is written."""
UNSTATED = object()
"""The ``default`` of a key that the framework requires, or whose default depends on others."""


def same(value: Any) -> Any:
    """The value as it is."""
    return value


@dataclass(frozen=True)
class To:
    """A key with a counterpart: ``key`` here has ``value(theirs)``; ``default`` is theirs."""

    key: str
    value: Callable[[Any], Any] = same
    default: Any = UNSTATED


@dataclass(frozen=True)
class Together:
    """A key that gives ``keys`` here together with others."""

    keys: str


@dataclass(frozen=True)
class Meaningless:
    """A key without a counterpart, and the reason."""

    reason: str


Entry = To | Together | Meaningless
Table = Mapping[str, Entry]
"""Entries by key or by pattern, in which ``*`` stands for any text; the first that fits counts."""


def on_or(name: Any, otherwise: Any = ABSENT) -> Callable[[Any], Any]:
    """A function of a switch: ``name`` if it is on, ``otherwise`` if it is off."""
    return lambda value: name if value else otherwise


def above_zero(value: Any) -> Any:
    """The number, or nothing where it is none, 0 or negative, which mean no limit there."""
    return value if isinstance(value, int | float) and value > 0 else ABSENT


def top_k(value: Any) -> int:
    """The number of tokens that are sampled from; 0 for none and -1, which mean all of them."""
    return max(int(value or 0), 0)


def schedule(value: Any) -> str:
    """``constant`` or ``cosine``, by their names of it. Unmapped for any other one."""
    names = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
    if value not in names:
        raise Unmapped(f"there is no schedule {value!r} here: constant and cosine are")
    return names[value]
