"""The rows of a source that is read while it is needed: a window of them is in memory.

    source.rows(start) ──► window 0 │ window 1 │ … ──each shuffled by itself──► rows

Which row is how many-th follows from the seed alone, so that a cursor is all that a resumed run
needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

from async_opd.core.errors import SourceError
from async_opd.core.row import Row

Entry = Row | SourceError
KEPT = 3
"""Windows in memory: a resumed run looks for prompts of the newest ones."""


class StreamedRows:
    """``read(start)`` yields the rows from position ``start`` on, the same ones every time."""

    def __init__(self, read: Callable[[int], Iterator[Entry]], window: int) -> None:
        """``window``: rows that are shuffled with each other."""
        self._read, self._size = read, window
        self._windows: dict[int, list[Entry]] = {}
        self._rest: Iterator[Entry] = iter(())
        self._at = -1  # the window that ``_rest`` begins with
        self._length: int | None = None
        self._order: tuple[str, list[int]] = ("", [])

    @property
    def head(self) -> list[Entry]:
        """The first window."""
        return self._window(0)

    def taken(self, count: int, seed: str | None) -> tuple[Entry, int]:
        """The row after ``count`` others, and its epoch. SourceError if there are no rows.

        ``seed`` shuffles the rows of a window, in each epoch anew; None: they come as they are.
        """
        epoch, position = divmod(count, self._length) if self._length else (0, count)
        number, offset = divmod(position, self._size)
        entries = self._window(number)
        if offset < len(entries):
            if seed is not None:
                offset = self._shuffled(entries, f"{seed}/{epoch}/{number}")[offset]
            return entries[offset], epoch
        self._length = self._counted(number, len(entries))
        if not self._length:
            raise SourceError("a streamed source", "has no rows")
        return self.taken(count, seed)

    def find(self, number: int) -> Row:
        """The row with this number in its uid: its position, or more by what was left out before.

        KeyError if there is none, or if it is unreadable. Numbers grow, and so a bisection reads
        few windows, however much was left out.
        """
        low, high = 0, number // self._size  # the windows that may have it
        window = high
        while low <= high:
            entries = {_number(one): one for one in self._window(window)}
            if isinstance(found := entries.get(number), Row):
                return found
            if not entries or min(entries) > number:
                high = window - 1
            else:
                low = window + 1
            window = (low + high) // 2
        raise KeyError(number)

    def _counted(self, number: int, rows: int) -> int:
        """The number of rows of the source, of which window ``number`` is the last, with ``rows``.

        An empty window says nothing of the rows before it, unless the one before it is known: after
        a resume far into the stream all rows are read once.
        """
        if rows or len(self._windows.get(number - 1, ())) == self._size:
            return number * self._size + rows
        return sum(1 for _ in self._read(0))

    def _shuffled(self, entries: list[Entry], seed: str) -> list[int]:
        if self._order[0] != seed:
            order = list(range(len(entries)))
            random.Random(seed).shuffle(order)
            self._order = seed, order
        return self._order[1]

    def _window(self, number: int) -> list[Entry]:
        if number not in self._windows:
            if number != self._at:
                self._rest = self._read(number * self._size)
            self._at = -1  # an error leaves the rest inside of a window: it is read again then
            self._windows[number] = list(islice(self._rest, self._size))
            self._at = number + 1
            while len(self._windows) > KEPT:
                del self._windows[next(iter(self._windows))]
        return self._windows[number]


def _number(entry: Entry) -> int:
    return number_of(entry) if isinstance(entry, Row) else (entry.row or 1) - 1


def number_of(row: Row) -> int:
    """The number in a row's uid."""
    return int(row.uid.rpartition(":")[2])
