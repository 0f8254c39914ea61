"""Files that survive a power failure, their checksums, and the space that a disk has for them."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from async_opd.core.reports import WrittenFile
from async_opd.files.foreign import Place, foreign


def written_file(path: Path) -> WrittenFile:
    """Flushes a file to the disk; returns its size and checksum. OSError."""
    flush(path)
    return checksum(path)


def checksum(path: Place) -> WrittenFile:
    """Size and SHA-256 of a regular file. OSError."""
    opened: Any = foreign(path).open("rb")
    with opened as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return WrittenFile(file.tell(), digest)


def flush(path: Path) -> None:
    """Flushes a file's bytes, or a folder's names, to the disk (fsync). OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SPARE_BYTES = 1 << 30
"""Bytes that stay free, or half of what is free if that is less."""


def without_space(needed: int, place: Path) -> str | None:
    """The figures if the disk lacks space for so many bytes at a place, which need not exist yet.

    OSError if the disk cannot be asked.
    """
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    spare = min(SPARE_BYTES, free // 2)
    if needed <= free - spare:
        return None
    return f"{needed} bytes; {free} are free at {there}, of which {spare} stay free"
