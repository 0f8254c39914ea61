"""The errors at the end of what a process wrote to its log."""

from __future__ import annotations

import os

from async_opd.files.safe_open import regular_file

LOG_BYTES, MAX_LINE_CHARACTERS = 1 << 18, 2000
"""Bytes read from the end of a log, and characters shown of one of its lines."""
QUOTED_CHARACTERS = 300


def error_lines(path: str, lines: int) -> list[str]:
    """The last lines of a regular file that speak of an error.

    For any other file, one line that says what it is.
    """
    try:
        with open(path, "rb", opener=regular_file) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            data = file.read(LOG_BYTES)
    except OSError as error:
        return [f"error: {error}"]
    found = [line.rstrip() for line in data.decode(errors="replace").split("\n")]
    return [line[:MAX_LINE_CHARACTERS] for line in found if "rror" in line][-lines:]


def own_last_error(descriptors: tuple[int, ...] = (2, 1)) -> str:
    """The last error line in the files that this process and its children write their output to.

    '' if there is none, or if they write to no file.
    """
    for descriptor in descriptors:
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        found = error_lines(path, 1) if os.path.isfile(path) else []
        if found:
            return found[0].strip()[:QUOTED_CHARACTERS]
    return ""
