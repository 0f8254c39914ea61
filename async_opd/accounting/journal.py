"""What became of every sample, as it happens: ``ledger.jsonl`` of the run directory.

    {"admitted": [uid, …]}    {"step": 7, "trained": [uid, …]}    {"dead": [uid]}

Written by the ledger, line by line; read by ``async_opd.accounting.audit``. A checkpoint knows how
long the file was; a resumed run cuts what came after it, because those steps are not in its
weights.

A journal that could not write a line misses it: from then on it has no size, so that no checkpoint
refers to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from async_opd.core.errors import StageError
from async_opd.core.uid import Uid
from async_opd.files.lines import append_line, whole_lines
from async_opd.files.safe_open import regular_file

LEDGER = "ledger.jsonl"


class Journal:
    """Appends lines to a file that is cut to ``size`` bytes first. A context manager."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self._path = path
        self._size = size
        self._broken: StageError | None = None

    def __enter__(self) -> Self:
        """OSError if the file cannot be written."""
        self._file = open(self._path, "ab", buffering=0, opener=regular_file)
        self.rewind(self._size)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def admitted(self, uids: Iterable[Uid]) -> None:
        """Samples entered the pipeline."""
        self._line({"admitted": list(uids)})

    def trained(self, step: int, uids: Iterable[Uid]) -> None:
        """The batch of an optimizer step."""
        self._line({"step": step, "trained": list(uids)})

    def dead(self, uid: Uid) -> None:
        """A sample that will never be trained."""
        self._line({"dead": [uid]})

    @property
    def size(self) -> int:
        """Bytes written so far. StageError if a line could not be written."""
        self._refuse_if_broken()
        return self._size

    def rewind(self, size: int) -> None:
        """Forgets what came after so many bytes, and a line that is torn."""
        self._size = whole_lines(self._path, size)
        self._file.truncate(self._size)
        self._broken = None

    def sync(self) -> None:
        """Everything written so far is on the disk when this returns."""
        os.fsync(self._file.fileno())

    def _line(self, entry: dict[str, Any]) -> None:
        """StageError if it cannot be written, from then on."""
        self._refuse_if_broken()
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            append_line(self._file, line)
        except OSError as error:
            cause = f"{self._path} cannot be written: {error.strerror or error}"
            remedy = "make room on its disk, or choose another run_dir"
            self._broken = StageError("ledger", cause, remedy)
            raise self._broken from error
        self._size += len(line)

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken
