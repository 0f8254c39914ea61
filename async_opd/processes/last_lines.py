"""The errors at the end of what a process wrote to its log."""

from __future__ import annotations

import os
import re

from async_opd.files.safe_open import regular_file

LOG_BYTES, MAX_LINE_CHARACTERS = 1 << 18, 2000
"""Bytes read from the end of a log, and characters shown of one of its lines."""
QUOTED_CHARACTERS, QUOTED_LINES = 300, 3
_WARNING = re.compile(r"\bW\d{4} \d\d:|WARNING|\w*Warning:")
"""Marks of a line that torch, vLLM or Python's ``warnings`` logged as a warning."""


def error_lines(path: str, lines: int) -> list[str]:
    """The last lines of a regular file that report an error.

    For any other file, one line that says what it is.
    """
    return [line for line in _last_lines(path) if _is_error(line)][-lines:]


def _is_error(line: str) -> bool:
    """Whether a line reports an error, and not a warning (of an error in a future release)."""
    return "rror" in line and _WARNING.search(line) is None


def _last_lines(path: str) -> list[str]:
    """The lines at the end of a regular file; of any other one that says what it is."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            data = file.read(LOG_BYTES)
    except OSError as error:
        return [f"error: {error}"]
    found = [line.rstrip() for line in data.decode(errors="replace").split("\n")]
    return [line[:MAX_LINE_CHARACTERS] for line in found]


def last_error_line(descriptors: tuple[int, ...] = (2, 1)) -> str:
    """The last lines of the files that this process and its children write their output to.

    The last error line, or where there is none, as of a process that was killed, the last lines; ''
    if there are none, or if they write to no file.
    """
    ends: list[str] = []
    for descriptor in descriptors:
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        found = [line.strip() for line in _last_lines(path) if line] if os.path.isfile(path) else []
        errors = [line for line in found if _is_error(line)]
        if errors:
            return f"the last error in its output: {errors[-1][:QUOTED_CHARACTERS]}"
        ends = ends or found[-QUOTED_LINES:]
    words = " / ".join(line[:QUOTED_CHARACTERS] for line in ends)
    return f"its output has no error and ends with: {words}" if words else ""
