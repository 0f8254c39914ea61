"""Files of lines that only grow. A line is there as a whole, or not at all.

A kill or a full disk may tear the last line. Whoever goes on with the file cuts the torn part off
first (``whole_lines``): what is appended to it would be lost with it.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

from async_opd.files.safe_open import regular_file

CHUNK = 1 << 16


def append_line(file: io.RawIOBase, line: bytes) -> None:
    """Writes all of ``line`` at the end of an unbuffered file, or leaves the file as it was.

    OSError if that cannot be written: a full disk may take a part of it without an error.
    """
    before = file.seek(0, os.SEEK_END)
    rest = memoryview(line)
    try:
        while rest:
            written = file.write(rest)
            if not written:
                raise OSError(f"{len(rest)} of {len(line)} bytes were not written")
            rest = rest[written:]
    except OSError:
        with suppress(OSError):
            file.truncate(before)
        raise


def end_torn_line(path: Path) -> None:
    """What is appended next has a line of its own, and the torn one stays. OSError."""
    if path.exists() and whole_lines(path) < path.stat().st_size:
        with open(path, "ab", buffering=0, opener=regular_file) as file:
            append_line(file, b"\n")


def whole_lines(path: Path, most: int | None = None) -> int:
    """Bytes of the whole lines among the first ``most`` of a file; 0 if there is none. OSError."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            size = file.seek(0, os.SEEK_END)
            end = size if most is None else min(size, most)
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
