"""A sink whose library is called by a thread of its own: it may be slow, fail, or hang.

log ──row──► at most MAX_ROWS waiting ──thread──► Recorder (the library)
 ▲                                                    │
 └──────────────── the error of an earlier row ───────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from async_opd.observability.sinks import Sink, Summary
from async_opd.processes.background import BackgroundWorker

MAX_ROWS = 1000
"""Rows that may wait for the library."""

Row = tuple[int, dict[str, float]]


class Recorder(Protocol):
    """One run in a logger's library."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes finite values of a step."""

    def end(self, summary: Summary) -> None:
        """Ends the run as the summary says."""


class ThreadedSink(Sink):
    """Calls ``opened()`` and then its recorder in a thread; errors are raised by a later call."""

    def __init__(self, name: str, opened: Callable[[], Recorder], close_s: float) -> None:
        """``close_s`` bounds ``close``."""
        self._name = name
        self._opened = opened
        self._close_s = close_s
        self._recorder: Recorder | None = None
        self._failure: Exception | None = None
        self._dropped = 0
        self._writer: BackgroundWorker[Row | Summary] = BackgroundWorker(name, self._do, MAX_ROWS)

    @property
    def name(self) -> str:
        """The library's name."""
        return self._name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the finite values on; counts the row as dropped if too many wait."""
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        self._dropped += not self._writer.put((step, finite))
        self._raise()

    def close(self, summary: Summary) -> str | None:
        """Ends the run in the library. Returns a message if its record is not complete."""
        self._writer.put(summary)
        if not self._writer.close(self._close_s):
            waiting = self._writer.waiting
            return f"{self._name} did not take {waiting} rows within {self._close_s:g} s"
        self._raise()
        return f"{self._name} lacks {self._dropped} rows: it was behind" if self._dropped else None

    def _do(self, items: list[Row | Summary]) -> None:
        for item in items:
            try:
                if self._recorder is None:
                    self._recorder = self._opened()
                if isinstance(item, Summary):
                    self._recorder.end(item)
                else:
                    self._recorder.write(*item)
            except Exception as error:  # of any library
                self._failure = error

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
