"""The rows of a source that is read while it is needed: a window of them is in memory.

    source.rows(start) ──► window 0 │ window 1 │ … ──each shuffled by itself──► rows

Which row is how many-th follows from the seed alone, so that a cursor is all that a resumed run
needs. From the middle of a window on, a thread reads the next one: the caller is an event loop.
"""

from __future__ import annotations

import random
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice

from async_opd.core.errors import SourceError
from async_opd.core.row import Row

Entry = Row | SourceError
KNOWN = 256
"""Rows that fit, of every so many of which the position in the source is noted."""
KEPT = 3
"""Windows in memory: a resumed run looks for prompts of the newest ones."""


class StreamedRows:
    """``read(start)`` yields the rows from position ``start`` on, the same ones every time."""

    def __init__(self, read: Callable[[int], Iterator[Entry]], window: int) -> None:
        """``window``: rows that are shuffled with each other."""
        self._source, self._size = read, window
        self.rows_read = 0
        """Rows that have come from the source so far, left out, or again, too."""
        self._windows: dict[int, list[Entry]] = {}
        self._rest: Iterator[Entry] = iter(())
        self._at = -1  # the window that ``_rest`` begins with
        self._ahead: tuple[int, Future[list[Entry]]] | None = None  # what a thread reads
        self._length: int | None = None
        self._order: tuple[str, list[int]] = ("", [])
        self._fitting: _Fitting | None = None

    def only(self, fits: Callable[[Row], bool]) -> StreamedRows:
        """The same rows without those that do not fit; unreadable ones stay.

        Where a position lies in the source is only known once all rows before it were looked at: a
        run that is resumed far into the source does so once.
        """
        made = StreamedRows(self._source, self._size)
        made._fitting = _Fitting(made._rows, fits)
        return made

    def _read(self, start: int) -> Iterator[Entry]:
        return self._rows(start) if self._fitting is None else self._fitting.read(start)

    def _rows(self, start: int) -> Iterator[Entry]:
        for entry in self._source(start):
            self.rows_read += 1
            yield entry

    @property
    def left_out(self) -> int | None:
        """Rows that ``only`` left out so far, each counted once; None if all rows come."""
        return None if self._fitting is None else self._fitting.left_out

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
            if 2 * offset >= len(entries):
                self._read_ahead(number + 1 if len(entries) == self._size else 0)
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
        self._take_ahead()
        return sum(1 for _ in self._read(0))

    def _shuffled(self, entries: list[Entry], seed: str) -> list[int]:
        if self._order[0] != seed:
            order = list(range(len(entries)))
            random.Random(seed).shuffle(order)
            self._order = seed, order
        return self._order[1]

    def _window(self, number: int) -> list[Entry]:
        if number not in self._windows:
            self._take_ahead()
        if number not in self._windows:
            self._keep(number, self._loaded(number))
        return self._windows[number]

    def _loaded(self, number: int) -> list[Entry]:
        if number != self._at:
            self._rest = self._read(number * self._size)
        self._at = -1  # an error leaves the rest inside of a window: it is read again then
        entries = list(islice(self._rest, self._size))
        self._at = number + 1
        return entries

    def _keep(self, number: int, entries: list[Entry]) -> None:
        self._windows[number] = entries
        while len(self._windows) > KEPT:
            del self._windows[next(iter(self._windows))]

    def _read_ahead(self, number: int) -> None:
        """Begins to read a window on a thread, unless it is there or another one is being read."""
        if number in self._windows or self._ahead is not None:
            return
        made: Future[list[Entry]] = Future()

        def read() -> None:
            try:
                made.set_result(self._loaded(number))
            except BaseException as error:
                made.set_exception(error)

        self._ahead = number, made
        threading.Thread(target=read, name="read rows", daemon=True).start()

    def _take_ahead(self) -> None:
        """Waits for the window that a thread reads: nothing else reads meanwhile.

        After an error it is read again when its turn comes, and the error is raised then.
        """
        if self._ahead is not None:
            (number, made), self._ahead = self._ahead, None
            if made.exception() is None:
                self._keep(number, made.result())


class _Fitting:
    """Reads the entries that fit. ``_known``: positions among them, and in the source, by order.

    ``left_out`` counts the others. Rows are read again (epochs, a lost window): those before
    ``_counted``, a position in the source, are in it.
    """

    def __init__(self, read: Callable[[int], Iterator[Entry]], fits: Callable[[Row], bool]) -> None:
        self._read, self._fits = read, fits
        self._known = [(0, 0)]
        self._counted = self.left_out = 0

    def read(self, start: int) -> Iterator[Entry]:
        """The entries from position ``start`` among those that fit."""
        at, position = self._known[bisect_right(self._known, (start, sys.maxsize)) - 1]
        for entry in self._read(position):
            position += 1
            left_out = isinstance(entry, Row) and not self._fits(entry)
            if position > self._counted:
                self._counted, self.left_out = position, self.left_out + left_out
            if left_out:
                continue
            if at >= start:
                yield entry
            at += 1
            if at % KNOWN == 0 and at > self._known[-1][0]:
                self._known.append((at, position))


def _number(entry: Entry) -> int:
    return number_of(entry) if isinstance(entry, Row) else (entry.row or 1) - 1


def number_of(row: Row) -> int:
    """The number in a row's uid."""
    return int(row.uid.rpartition(":")[2])
