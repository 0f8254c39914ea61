"""Standard output or standard error that never blocks its writer.

    write ──► a bounded queue ──► a thread ──► the descriptor, which may block for ever

Text that comes while the queue is full is dropped and its lines counted; the count is written when
there is room again. The descriptor is a copy: Python's own buffers are not used, whose locks a
blocked thread would hold when the process ends.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO, cast

from async_opd.processes.background import BackgroundWorker

MAX_CHARACTERS = 1 << 20
"""Characters that may wait for the reader."""
WRITE_BYTES = 1 << 16
CLOSE_S = 2.0
"""Seconds that the end of the run waits for the reader."""


class NonBlockingStream(io.TextIOBase):
    """A text file over the descriptor of another one. Only ``finish`` waits.

    An error of the thread's last write is raised by the next ``write`` here.
    """

    def __init__(self, file: TextIO, max_characters: int = MAX_CHARACTERS) -> None:
        self.dropped = 0
        self._unreported = 0
        self._encoding = file.encoding or "utf-8"
        self._terminal = file.isatty()
        self._descriptor = os.dup(file.fileno())
        self._writer = BackgroundWorker("output", self._drain, max_characters, len)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The other file's."""
        return self._encoding

    @property
    def waiting(self) -> int:
        """Characters that the system has not taken yet, because its buffer is full."""
        return self._writer.waiting

    def isatty(self) -> bool:
        """As the other file."""
        return self._terminal

    def fileno(self) -> int:
        """The copy of the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Hands the text over, or counts its lines. OSError of an earlier write."""
        if not text:
            return 0
        if self._unreported and self._writer.put(
            f"({self._unreported} lines dropped: the reader was behind)\n"
        ):
            self._unreported = 0
        if self._unreported or not self._writer.put(text):
            lines = text.count("\n")
            self.dropped += lines
            self._unreported += lines
        return len(text)

    def finish(self, timeout_s: float = CLOSE_S) -> bool:
        """Accepts no more text; whether all of it was written within the time. OSError."""
        if not self._writer.close(timeout_s):
            return False
        os.close(self._descriptor)
        return not self.dropped

    def _drain(self, texts: list[str]) -> None:
        data = memoryview("".join(texts).encode(self._encoding, "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._descriptor, data[:WRITE_BYTES]) :]
            except BlockingIOError:  # another process that shares the file made it non-blocking
                select.select([], [self._descriptor], [])


def nonblocking(file: TextIO) -> TextIO:
    """A NonBlockingStream over the file, or the file itself if it has no descriptor to block on.

    So is the output of a notebook's cell, whose descriptor is that of Jupyter's server.
    """
    if not isinstance(file, io.TextIOWrapper):
        return file
    try:
        return cast(TextIO, NonBlockingStream(file))
    except (AttributeError, OSError, ValueError):
        return file


def has_reader(file: TextIO) -> bool:
    """Whether a pipe is still read; True of any other file."""
    poll = select.poll()
    try:
        poll.register(file.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # a file of a test or a notebook, or none
        return True
    return not any(found & select.POLLERR for _, found in poll.poll(0))


def write_stderr(text: str) -> None:
    """Writes a line to standard error, which may be closed or never read. Never raises."""
    with suppress(OSError, ValueError):
        stream = nonblocking(sys.stderr)
        stream.write(f"{text}\n")
        if isinstance(stream, NonBlockingStream):
            stream.finish()
