"""What a grader's process, and whatever that starts, writes on standard output and error.

    the process and its children ──a pipe──► GraderOutput ──lines, escaped──► our standard error

It may quote a response, and a child writes past Python: so it is quoted here, line by line.
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
"""Of a line: what follows is on the next one."""
READ_BYTES = 1 << 16
SHOWN_BYTES = 1 << 16
"""Between two grades. What comes after it is read, and left out."""
PAUSE_S = 0.01
"""Between two reads of what is left out: somebody may write without end."""


class GraderOutput:
    """Reads the pipe whenever something is there; nobody waits for who writes it, or for its end.

    ``writer`` is the end for the process: close it when that has started.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or _standard_error(sys.stderr)
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._line = ""  # that has no end yet
        self._room = SHOWN_BYTES
        self._left_out = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def renew(self) -> None:
        """A grade begins, which may write as much as another one."""
        if self._left_out:
            self._tell(f"({self._left_out} bytes left out)")
        self._room, self._left_out = SHOWN_BYTES, 0

    def close(self) -> None:
        """Reads what is there, and no more: children that live on may hold the other end."""
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
            again = partial(self._loop.add_reader, self._reader, self._read)
            self._timer = self._loop.call_later(PAUSE_S, again)

    def _take(self) -> bool:
        """Reads once; whether everybody has closed the other end."""
        try:
            data = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return False
        shown = data[: self._room]
        self._room -= len(shown)
        self._left_out += len(data) - len(shown)
        self._show(self._decoder.decode(shown))
        return not data

    def _show(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._tell_in_parts(line)
        if len(self._line) > MAX_CHARACTERS:
            whole = len(self._line) // MAX_CHARACTERS * MAX_CHARACTERS
            self._tell_in_parts(self._line[:whole])
            self._line = self._line[whole:]

    def _tell_in_parts(self, line: str) -> None:
        for start in range(0, max(len(line), 1), MAX_CHARACTERS):
            self._tell(line[start : start + MAX_CHARACTERS])

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            self._file.write(f"  grader: {on_one_line(line)}\n")


@cache
def _standard_error(file: TextIO) -> TextIO:
    """One for all graders of a process: it never waits for who reads it."""
    return nonblocking(file)
