"""A file that is there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Writes ``text`` beside ``path`` and renames it over: a reader sees the old file or the new.

    ``durable``: the bytes are on the disk before the rename. OSError if they cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
