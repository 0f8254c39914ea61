"""A sink whose library is called by a separate thread: it may be slow, fail, or hang.

log ──row──► at most MAX_ROWS waiting ──thread──► Recorder (the library)
 ▲                                                    │
 └──────────────── the error of an earlier row ───────┘

A step that the library has and that comes again, after a rewind or a resume, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from async_opd.observability.loggers.logged_run import LoggedRun, is_evaluation
from async_opd.observability.sinks import LateSink, Summary
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


class ThreadedSink(LateSink):
    """Calls ``opened()`` and then its recorder in a thread; errors are raised by a later call."""

    def __init__(
        self,
        name: str,
        opened: Callable[[], Recorder],
        close_s: float,
        known: LoggedRun | None = None,
        noted: Callable[[LoggedRun], None] = lambda at: None,
    ) -> None:
        """``close_s`` bounds ``close``. ``known``: the rows that the library has of this run.

        ``noted`` gets, with each row, the rows that the library then has.
        """
        self._name = name
        self._opened = opened
        self.longest_s = close_s
        self._known = self._at = known or LoggedRun.new()
        self._noted = noted
        self._recorder: Recorder | None = None
        self._dropped = 0
        self._writer: BackgroundWorker[Row | Summary] = BackgroundWorker(
            name, self._do, MAX_ROWS + 1
        )

    @property
    def name(self) -> str:
        """The library's name."""
        return self._name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the finite values on; counts the row as dropped if too many wait."""
        evaluation = is_evaluation(metrics)
        if self._known.has(step, evaluation=evaluation):
            return
        if self._writer.waiting >= MAX_ROWS:  # the place beyond is the summary's
            self._dropped += 1
            return
        self._at = self._at.after(step, evaluation=evaluation)
        self._noted(self._at)
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        self._writer.put((step, finite))
        self._raise()

    def rewind(self) -> None:
        """Keeps the rows that the library has: ``log`` skips their steps from now on."""
        self._known = self._at

    def close(self, summary: Summary) -> str | None:
        """Ends the run in the library. Returns a message if its record is not complete."""
        self._writer.put(summary)
        if not self._writer.close(self.longest_s):
            waiting = self._writer.waiting
            return f"{self._name} did not take {waiting} rows within {self.longest_s:g} s"
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
