"""A file that is there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from async_opd.files.safe_open import regular_file


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Writes ``text`` beside ``path`` and renames it over: a reader sees the old file or the new.

    ``durable``: the bytes are on the disk before the rename. OSError if they cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a process that had this one's number, or of a stranger
    try:
        with open(partial, "x", encoding="utf-8", opener=regular_file) as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
