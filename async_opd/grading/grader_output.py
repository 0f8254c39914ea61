"""Standard output and error of a grader's process and its children.

    the process and its children ──a pipe──► GraderOutput ──lines, escaped──► our standard error

The text may quote a response, and children may write without Python: so each line is escaped here.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
from contextlib import suppress
from functools import cache, partial
from typing import TextIO

from async_opd.core.printable import on_one_line
from async_opd.processes.output import nonblocking

MAX_CHARACTERS = 2000
"""The longest line; the rest of a longer one is shown as further lines."""
READ_BYTES = 1 << 16
SHOWN_BYTES = 1 << 16
"""Bytes shown between two grades. Those that follow are read and dropped."""
PAUSE_S = 0.01
"""Seconds between two reads of dropped bytes: a process may write without end."""


class GraderOutput:
    """Reads the pipe whenever it has bytes; nothing waits for its writers, or for their end.

    ``writer`` is the process's end of the pipe: the caller closes it once the process has started.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or _standard_error(sys.stderr)
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._line = ""  # the line that has no end yet
        self._room = SHOWN_BYTES
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def renew(self) -> None:
        """Allows ``SHOWN_BYTES`` more: a grade begins."""
        if self._dropped:
            self._print(f"({self._dropped} bytes dropped)")
        self._room, self._dropped = SHOWN_BYTES, 0

    def close(self) -> None:
        """Reads what is in the pipe and closes it, though children may still hold the other end."""
        if self._reader < 0:
            return
        self._pause()
        self._take()
        self._show("\n" if self._line else "")
        self.renew()
        os.close(self._reader)
        self._reader = -1

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._reader)

    def _read(self) -> None:
        ended = self._take()
        if ended or self._room <= 0:
            self._pause()
        if not ended and self._room <= 0:
            resume = partial(self._loop.add_reader, self._reader, self._read)
            self._timer = self._loop.call_later(PAUSE_S, resume)

    def _take(self) -> bool:
        """Reads once; whether all processes have closed the other end."""
        try:
            data = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return False
        shown = data[: self._room]
        self._room -= len(shown)
        self._dropped += len(data) - len(shown)
        self._show(self._decoder.decode(shown))
        return not data

    def _show(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._print_in_parts(line)
        if len(self._line) > MAX_CHARACTERS:
            whole = len(self._line) // MAX_CHARACTERS * MAX_CHARACTERS
            self._print_in_parts(self._line[:whole])
            self._line = self._line[whole:]

    def _print_in_parts(self, line: str) -> None:
        for start in range(0, max(len(line), 1), MAX_CHARACTERS):
            self._print(line[start : start + MAX_CHARACTERS])

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError):  # standard error is closed
            self._file.write(f"  grader: {on_one_line(line)}\n")


@cache
def _standard_error(file: TextIO) -> TextIO:
    """A stream that never blocks, one for all graders of this process."""
    return nonblocking(file)
