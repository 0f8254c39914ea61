"""A config in the making: their keys are read, ours are set, and what is lost is noted.

A key counts as read when its table entry or the framework's function has used it. An unused key
is unmapped, and is named in the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from async_opd.config.keys import default_of, keys_below
from async_opd.tools.importing.budget import Budget
from async_opd.tools.importing.entries import (
    ABSENT,
    UNSTATED,
    Entry,
    Meaningless,
    Table,
    To,
    Together,
    Unmapped,
)


@dataclass(frozen=True)
class Expression:
    """A value that only running the file would give: its source text."""

    text: str


@dataclass
class Draft:
    """The keys of a file by dotted name, ours that follow from them, and notes for the user."""

    theirs: Mapping[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    meaningless: dict[str, str] = field(default_factory=dict)
    unmapped: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    fill_in: list[str] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """Whether the file gives the key."""
        return key in self.theirs

    def below(self, prefix: str) -> list[str]:
        """The names directly below a dotted prefix, in the order of the file."""
        start = f"{prefix}."
        names = (
            key[len(start) :].partition(".")[0] for key in self.theirs if key.startswith(start)
        )
        return list(dict.fromkeys(names))

    def take(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that the file gives, which are then read.

        A value that only running the file would give counts as not given, and is named.
        """
        found = default
        for key in reversed(keys):
            if key not in self.theirs:
                continue
            value = self.theirs[key]
            self._read.add(key)
            if isinstance(value, Expression):
                self.unmapped[key] = f"its value is computed: {value.text}"
            else:
                found = value
        return found

    def given(self, *keys: str) -> float | None:
        """``take`` as a number; None if it is not given, or is none, which is named."""
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
        self.unmapped[named] = f"{found!r} is not a number"
        return None

    def number(self, *keys: str, default: float = 0) -> float:
        """``given``, or else the default."""
        found = self.given(*keys)
        return float(default) if found is None else found

    def whole(self, *keys: str, default: int = 0) -> int:
        """``number``, cut to an integer."""
        return int(self.number(*keys, default=default))

    def count(self, *keys: str, default: int = 1) -> int:
        """``whole`` of a size that others are divided by; below 1 it is named, and is 1."""
        found = self.whole(*keys, default=default)
        if found < 1:
            self.unmapped[next((one for one in keys if self.has(one)), keys[0])] = (
                f"{found} is below 1: 1 is used"
            )
        return max(found, 1)

    def put(self, key: str, value: Any) -> None:
        """Sets one of our keys, unless the value is our default."""
        if value is not ABSENT and value is not None and not _equal(value, default_of(key)):
            self.ours[key] = value

    def apply(self, table: Table) -> None:
        """Reads what the table's entries say one by one; defaults that differ are written too."""
        for key, value in self.theirs.items():
            entry = entry_of(table, key)
            if isinstance(entry, Meaningless):
                self.meaningless[key] = entry.reason
            elif isinstance(entry, To):
                self._set(key, entry, value)
        for key, entry in table.items():
            if isinstance(entry, To) and entry.default is not UNSTATED and "*" not in key:
                self._set_default(key, entry)

    def finish(self, table: Table) -> None:
        """Names every key that nothing has used."""
        for key in self.theirs:
            entry = entry_of(table, key)
            if isinstance(entry, Together) and not _exists(entry.keys):
                self.unmapped.setdefault(key, f"there is no {entry.keys} in this version")
            elif isinstance(entry, Together) and key in self._read and key not in self.unmapped:
                self.mapped.setdefault(key, entry.keys)
            elif isinstance(entry, Together):
                self.unmapped.setdefault(key, "beside the other settings it has no effect here")
            elif entry is None and key not in self._read:
                self.unmapped.setdefault(key, "")

    def _set(self, key: str, entry: To, value: Any) -> None:
        if isinstance(value, Expression):
            self.unmapped[key] = f"its value is computed: {value.text}"
            return
        try:
            found = entry.value(value)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            cause = str(error) if isinstance(error, Unmapped) else f"{value!r} does not fit"
            self.unmapped[key] = cause
            return
        self.mapped[key] = entry.key
        if found is not ABSENT and found is not None:
            self.ours.setdefault(entry.key, found)

    def _set_default(self, key: str, entry: To) -> None:
        if entry.key in self.ours or key in self.mapped:
            return
        found = entry.value(entry.default)
        if found is ABSENT or found is None or _equal(found, default_of(entry.key)):
            return
        self.ours[entry.key] = found
        self.defaults[key] = entry.key


def entry_of(table: Table, key: str) -> Entry | None:
    """The entry of a key: its own, else the first pattern that fits."""
    if key in table:
        return table[key]
    return next((entry for pattern, entry in table.items() if fnmatchcase(key, pattern)), None)


def _exists(keys: str) -> bool:
    """Whether one of the keys that ``Together`` names is a key of this version, or a remark."""
    names = re.split(r", | or ", keys)

    def known(name: str) -> list[str]:
        return keys_below(name.rpartition(".")[0])

    return any(
        not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name) or name.rpartition(".")[2] in known(name)
        for name in names
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


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
