"""Files that survive a power failure, and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from async_opd.core.written_file import WrittenFile
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
