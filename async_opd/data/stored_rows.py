"""The rows of a source, in a temporary file: reachable by position, and none of them in memory."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, overload

from async_opd.config.sections.data import PromptSource
from async_opd.core.errors import SourceError
from async_opd.core.row import Row

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig


MAX_WRONG = 5
"""Wrong rows of a source after which it is read no further."""


class StoredRows(Sequence[Row]):
    """Rows by position, 8 bytes of memory for each; the file has no name and ends with this.

    The file lies in ``TMPDIR``, else in /var/tmp: many machines hold /tmp in memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(dir=temporary_folder())  # noqa: SIM115
        weakref.finalize(self, _close, self._file)
        self._ends = array("Q")

    def append(self, row: Row) -> None:
        """Adds a row behind the others. OSError if there is no room for it."""
        self._file.seek(0, os.SEEK_END)
        pickle.dump(row, self._file, pickle.HIGHEST_PROTOCOL)
        self._ends.append(self._file.tell())

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self[one] for one in range(len(self))[at]]
        at = range(len(self))[at]
        self._file.seek(self._ends[at - 1] if at else 0)
        row: Row = pickle.load(self._file)  # no other process can write to a file without a name
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[at] for at in range(len(self)))


class KeptRows(Sequence[Row]):
    """Those of other rows that are at these positions, in order."""

    def __init__(self, rows: Sequence[Row], positions: Sequence[int]) -> None:
        self._rows, self._positions = rows, array("Q", positions)

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self._rows[one] for one in self._positions[at]]
        return self._rows[self._positions[at]]


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # a full disk was reported by the write that met it
        file.close()


def read_source(
    source: PromptSource, index: int, data: DataConfig, look: Callable[[Row], None] | None = None
) -> StoredRows:
    """All rows of a source; ``look`` gets each of them.

    SourceError if one of them is wrong, with the first others; if there is none, or no room for
    them.
    """
    rows, wrong = StoredRows(), list[SourceError]()
    for entry in source.rows(index, data):
        if isinstance(entry, SourceError):
            wrong.append(entry)
            if len(wrong) == MAX_WRONG:
                break
            continue
        try:
            rows.append(entry)
        except OSError as error:
            place = f"a temporary file in {temporary_folder()}"
            message = f"rows cannot be kept in {place} ({error}): set TMPDIR, or stream the source"
            raise SourceError(source.label, message) from error
        if look is not None:
            look(entry)
    if wrong:
        wrong[0].others = wrong[1:]
        raise wrong[0]
    if not rows:
        raise SourceError(source.label, "has no rows")
    return rows


def temporary_folder() -> str:
    """Where temporary files go that may become large."""
    named = os.environ.get("TMPDIR")
    return named or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir())
