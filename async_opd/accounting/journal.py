"""The journal: ``ledger.jsonl`` of the run directory records each sample's outcome as it happens.

    {"admitted": [uid, …]}    {"step": 7, "trained": [uid, …]}    {"dead": [uid]}

The ledger writes it line by line, ``async_opd.accounting.audit`` reads it. A checkpoint holds the
file's size; a resumed run cuts off what follows, because those steps are not in its weights.

After a failed write a line is missing: ``size`` raises from then on, so that no checkpoint
refers to the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from async_opd.core.errors import StageError
from async_opd.core.uid import Uid
from async_opd.files.lines import append_line, whole_lines
from async_opd.files.safe_open import regular_file

LEDGER = "ledger.jsonl"


class Journal:
    """A context manager that cuts the file to ``size`` bytes and then appends lines to it."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self._path = path
        self._size = size
        self._broken: StageError | None = None

    def __enter__(self) -> Self:
        """OSError if the file cannot be written."""
        self._file = open(self._path, "ab", buffering=0, opener=regular_file)
        self.rewind(self._size)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def admitted(self, uids: Iterable[Uid]) -> None:
        """Records samples that entered the pipeline. These three raise StageError as ``size``."""
        self._line({"admitted": list(uids)})

    def trained(self, step: int, uids: Iterable[Uid]) -> None:
        """Records the batch of an optimizer step."""
        self._line({"step": step, "trained": list(uids)})

    def dead(self, uid: Uid) -> None:
        """Records a sample that will never be trained."""
        self._line({"dead": [uid]})

    @property
    def size(self) -> int:
        """Bytes written so far. StageError if a line could not be written."""
        self._refuse_if_broken()
        return self._size

    def rewind(self, size: int) -> None:
        """Cuts the file to its whole lines within the first ``size`` bytes. OSError."""
        self._size = whole_lines(self._path, size)
        self._file.truncate(self._size)
        self._broken = None

    def sync(self) -> None:
        """Flushes all lines to the disk (fsync)."""
        os.fsync(self._file.fileno())

    def _line(self, entry: dict[str, Any]) -> None:
        """Appends one line. StageError if it, or an earlier one, could not be written."""
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
