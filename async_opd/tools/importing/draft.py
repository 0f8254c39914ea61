"""A config in the making: their keys are read, ours are set, and what is lost is noted.

    apply            keys with one counterpart
    (together)       the framework's function: keys that several of theirs give
    fill_unreadable  placeholders for all that a value gives which could not be read
    account          every key of theirs is named: what became of it

A value that could not be read never becomes a default: its keys here are placeholders, under
``fill_in``. ``mapped`` has only keys that stand in the result.

A ``Budget`` bounds what a file becomes with its variables, aliases and references in place:

    a file of at most ``FILE_BYTES`` ──a reader──► keys and values of at most ``MAX_CHARACTERS``

A few lines can double a text beyond all memory, and many lines can each repeat a long one.
Therefore all readers of a file take what they put in place from one budget, before they build it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from async_opd.config.keys import default_of, keys_below
from async_opd.tools.importing.table import (
    CONVERSIONS,
    UNSTATED,
    Entry,
    NoCounterpart,
    Table,
    entry_of,
)

FILE_BYTES = 1 << 20
MAX_CHARACTERS = 1 << 22


@dataclass
class Budget:
    """Characters of keys and values that are left for a file."""

    left: int = MAX_CHARACTERS

    def take(self, characters: int, what: str) -> None:
        """SyntaxError if the file has more characters than are left for it."""
        self.left -= characters
        if self.left < 0:
            raise SyntaxError(
                f"with its variables, aliases and references in place it has more than "
                f"{MAX_CHARACTERS:,} characters, at {what[:80]!r}"
            )


FILE = "data/train.jsonl"
"""The file that is named where the framework names no data that can be read here."""
PLACEHOLDERS: dict[str, Any] = {"student.model": "STUDENT", "data.train": [FILE]}
PLACEHOLDERS |= {"model": "TEACHER", "served_model": "TEACHER"}
"""Texts that stand for a value to be filled in, by our key or its last part; else FILL_IN."""
BESIDE = "beside the other settings it has no effect here"
SHOWN = 80
"""Characters of a value that is one of several for a key."""
EITHER = {"train.steps": "train.epochs", "train.epochs": "train.steps"}


@dataclass(frozen=True)
class Expression:
    """A value that only running the file would give, by its source text."""

    text: str
    how: str = "computed"


@dataclass
class Draft:
    """The keys of a file by dotted name, ours that follow from them, and notes for the user.

    ``fill_in`` says why a key here waits for the user, ``another`` why the run there is not
    on-policy distillation as it is here. ``unreadable`` are their keys whose value is not known.
    """

    theirs: Mapping[str, Any]
    table: Table
    ours: dict[str, Any] = field(default_factory=dict)
    mapped: dict[str, list[str]] = field(default_factory=dict)
    defaults: dict[str, list[str]] = field(default_factory=dict)
    meaningless: dict[str, str] = field(default_factory=dict)
    unmapped: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    fill_in: dict[str, str] = field(default_factory=dict)
    another: list[str] = field(default_factory=list)
    _gives: dict[str, list[str]] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    _spare: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.theirs = {key: _json(value) for key, value in self.theirs.items()}
        self._entries = {key: entry_of(self.table, key) for key in self.theirs}

    def has(self, key: str) -> bool:
        """Whether the file gives the key."""
        return key in self.theirs

    def below(self, prefix: str) -> list[str]:
        """The names directly below a dotted prefix, in the order of the file."""
        start = f"{prefix}."
        names = (k[len(start) :].partition(".")[0] for k in self.theirs if k.startswith(start))
        return list(dict.fromkeys(names))

    def take(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that the file gives, which are then read.

        A value that only running the file would give is the default until ``fill_unreadable``.
        """
        found = default
        for key in reversed(keys):
            if key not in self.theirs:
                continue
            value = self.theirs[key]
            self._read.add(key)
            if isinstance(value, Expression):
                self.unreadable[key] = _why(value)
                found = default
            else:
                found = value
        return found

    def give(self, ours: str, *keys: str, default: Any = None) -> Any:
        """``take`` into one of our keys, which their table need not name; returns its value."""
        found = self.take(*keys, default=default)
        if found is not None:
            self.ours[ours] = found
        for key in keys:
            self.gives(key, ours)
        return found

    def gives(self, key: str, *ours: str) -> None:
        """Records that a key of theirs gives these keys here, in place of those in its table."""
        self._gives.setdefault(key, []).extend(ours)

    def given(self, *keys: str) -> float | None:
        """``take`` as a number; None if it is not given, or could not be read."""
        found = self.take(*keys)
        if found is None:
            return None
        try:
            number = float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        named = next(key for key in keys if self.theirs.get(key) is found)
        self.unreadable[named] = f"{found!r} is not a number"
        return None

    def number(self, *keys: str, default: float = 0) -> float:
        """``given``, or else the default."""
        found = self.given(*keys)
        return float(default) if found is None else found

    def whole(self, *keys: str, default: int = 0) -> int:
        """``number``, cut to an integer."""
        return int(self.number(*keys, default=default))

    def count(self, *keys: str, default: int = 1) -> int:
        """``whole`` of a size that others are divided by; below 1 it counts as not read."""
        found = self.whole(*keys, default=default)
        if found < 1:
            named = next((one for one in keys if self.has(one)), keys[0])
            self.unreadable[named] = f"{found} is below 1"
        return max(found, 1)

    def put(self, key: str, value: Any) -> None:
        """Sets one of our keys; ``account`` drops it if it is a default here and there."""
        if value is not None:
            self.ours[key] = value
            self._spare.add(key)

    def fill(self, key: str, why: str) -> None:
        """Sets a placeholder for one of our keys, in place of the keys below it."""
        for below in keys_below(key):
            self.ours.pop(f"{key}.{below}", None)
        self.ours.pop(EITHER.get(key, ""), None)
        last = key.rpartition(".")[2]
        self.ours[key] = PLACEHOLDERS.get(key) or PLACEHOLDERS.get(last, "FILL_IN")
        self.fill_in.setdefault(key, why)

    def apply(self) -> None:
        """Reads what the table's entries say one by one; defaults that differ are written too."""
        for key, value in self.theirs.items():
            entry = self._entries[key]
            if entry is not None and entry.reason:
                self.meaningless[key] = entry.reason
            elif entry is not None and entry.ours and not entry.together:
                self._set(key, entry, value)
        for key, entry in self.table.items():
            if entry.default is UNSTATED or key in self.theirs or entry.ours[0] in self.ours:
                continue
            found = CONVERSIONS[entry.convert](entry.default)
            if found is not None and not _equal(found, default_of(entry.ours[0])):
                self.ours[entry.ours[0]] = found

    def _set(self, key: str, entry: Entry, value: Any) -> None:
        self._read.add(key)
        if isinstance(value, Expression):
            self.unreadable[key] = _why(value)
            return
        try:
            found = CONVERSIONS[entry.convert](value)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            cause = str(error) if isinstance(error, NoCounterpart) else f"{value!r} does not fit"
            self.unreadable[key] = cause
            return
        if found is None:
            self.meaningless[key] = "it is the default here"
        elif self.ours.setdefault(entry.ours[0], found) != found:
            self.unmapped[key] = "another key of the file gives the same key here"

    def fill_unreadable(self) -> None:
        """Placeholders for the keys here that a value gives which could not be read."""
        for key, why in self.unreadable.items():
            gives, entry = self._keys_of(key), self._entries.get(key)
            self.unmapped[key] = why
            for ours in [one for one in gives if one in self.ours or one == gives[0]]:
                self.fill(ours, f"{key} could not be read: {why}")
            if entry is not None and entry.note:
                self.fill_in[key] = f"it could not be read: {why}"
                self.differs = [one for one in self.differs if not one.startswith(f"{key}:")]
        for key, value in self.theirs.items():
            if key.startswith("**") and isinstance(value, Expression):
                self.fill_in[key] = f"{value.text} may set any key of the run: compare all of them"

    def account(self) -> None:
        """Names every key of theirs, and the defaults that were written."""
        given = set[str]()
        for key in self.theirs:
            used = key in self._read and key in self._gives
            if key in self.unmapped or (key in self.meaningless and not used):
                continue
            self.meaningless.pop(key, None)
            entry = self._entries[key]
            known = self._keys_of(key)
            found = [one for one in known if one in self.ours and one not in self.fill_in]
            if key not in self._read:
                self.unmapped[key] = BESIDE if entry else _why(self.theirs[key])
            elif found:
                self.mapped[key] = found
                given.update(found)
            elif entry is not None and entry.note:
                self.meaningless[key] = f"no key here has it: it is {entry.note}"
            else:
                waits = next((one for one in known if one in self.fill_in), None)
                self.unmapped[key] = f"{waits} is to be filled in" if waits else BESIDE
        for ours in self._spare - given:
            if _equal(self.ours.get(ours), default_of(ours)):
                self.ours.pop(ours, None)
        for key, entry in self.table.items():
            for ours in entry.ours if key not in self.theirs and "*" not in key else ():
                if ours in self.ours and ours not in given and ours not in self.fill_in:
                    self.defaults[key] = [ours]
                    given.add(ours)

    def _keys_of(self, key: str) -> list[str]:
        """The keys here that a key of theirs gives."""
        entry = self._entries.get(key)
        return self._gives.get(key) or list(entry.ours if entry is not None else ())


def teacher_of(source: str) -> str:
    """The key of the teacher of one source."""
    return "teachers." + re.sub(r"[^\w-]", "-", source)


def _why(value: Any) -> str:
    """Why a value is not known; empty for one that is."""
    return f"its value is {value.how}: {value.text}" if isinstance(value, Expression) else ""


def _json(value: Any) -> Any:
    """The value, or an Expression for a date, a set, bytes and others that JSON does not have."""
    try:
        json.dumps(None if isinstance(value, Expression) else value)
    except (TypeError, ValueError, RecursionError):
        return Expression(type(value).__name__, "not JSON")
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def add(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Adds keys; one that has another value already becomes an Expression of both."""
    for key, value in given.items():
        if key in found and found[key] != value:
            both = (getattr(one, "text", repr(one))[:SHOWN] for one in (found[key], value))
            value = Expression(" or ".join(both))
        found[key] = value


def flat(tree: Any, budget: Budget, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; tables inside of a list have their index as a part of it.

    SyntaxError if they are more than the budget.
    """
    if isinstance(tree, list) and any(isinstance(one, dict) for one in tree):
        tree = {str(index): one for index, one in enumerate(tree)}
    if not isinstance(tree, dict) or (prefix and not tree):
        budget.take(len(prefix) + len(str(tree)), prefix)
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found.update(flat(value, budget, f"{prefix}.{name}" if prefix else str(name)))
    return found
