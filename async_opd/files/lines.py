"""Files of lines that only grow. A line is in the file as a whole or not at all.

A kill or a full disk may tear the last line. The next writer cuts the torn part off first
(``whole_lines``): a line appended to it would be unreadable too.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

from async_opd.files.safe_open import regular_file

CHUNK = 1 << 16
"""Bytes that are read at once, from the end."""


def append_line(file: io.RawIOBase, line: bytes) -> None:
    """Writes all of ``line`` at the end of an unbuffered file. OSError: the file is as it was."""
    before = file.seek(0, os.SEEK_END)
    rest = memoryview(line)
    try:
        while rest:
            written = file.write(rest)  # a full disk may take a part without an error
            if not written:
                raise OSError(f"{len(rest)} of {len(line)} bytes were not written: no space left?")
            rest = rest[written:]
    except OSError:
        with suppress(OSError):
            file.truncate(before)
        raise


def end_torn_line(path: Path) -> None:
    """Ends a torn last line with a newline, so that the next line is whole. OSError."""
    if path.exists() and whole_lines(path) < path.stat().st_size:
        with open(path, "ab", buffering=0, opener=regular_file) as file:
            append_line(file, b"\n")


def whole_lines(path: Path, limit: int | None = None) -> int:
    """Bytes of the whole lines within a file's first ``limit`` bytes; 0 for no file. OSError."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            size = file.seek(0, os.SEEK_END)
            end = size if limit is None else min(size, limit)
            while end > 0:
                start = max(0, end - CHUNK)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
    except FileNotFoundError:
        pass
    return 0
