"""Sinks of a run's metrics and messages besides its files: the console, wandb, the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from async_opd.core.reports import Interval

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True)
class Summary:
    """How a run ended: the content of ``summary.json``, in which each metric is a separate key.

    ``steps`` is the last step that was logged, ``seconds`` the time that the log was open, in all
    parts of a resumed run, ``metrics`` the last value of every metric (the summarized ones win).
    ``notes`` has the messages of each sink: on what differs from the config, or is incomplete.
    """

    status: Status
    error: str | None
    steps: int
    seconds: float
    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


class Sink(Protocol):
    """A receiver that may fail: RunLog reports the errors of its methods, and the run goes on.

    ``start`` is called first and ``close`` last. A sink whose ``start`` raised is not called again.
    A class that inherits from this one ignores what it does not override. The errors of a sink that
    is ``required`` end the run.
    """

    required: ClassVar[bool] = False
    longest_s: float = math.inf
    """Seconds that ``start`` and ``close`` may each take; ``inf`` means without a bound."""

    @property
    def name(self) -> str:
        """The sink's name in messages."""
        ...

    def start(self) -> str | None:
        """Opens the sink. Returns a message if it differs from what the config asks for."""
        return None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives the metrics of a step; a step may come several times, with other metrics."""
        return

    def rewind(self) -> None:
        """Called when the run goes back to a checkpoint: later steps come once more."""
        return

    def waits(self, waits: Mapping[str, str]) -> None:
        """Receives what each pool waits for ('' if it computes)."""
        return

    def busy(self, pools: Mapping[str, Sequence[Interval]]) -> None:
        """Receives the intervals in which each pool computed since the last call."""
        return

    def message(self, text: str) -> None:
        """Receives a line of ``run.log``."""
        return

    def checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete."""
        return

    def close(self, summary: Summary) -> str | None:
        """Called when the run has ended. Returns a message if the sink's record is incomplete."""
        return None


class LateSink(Sink):
    """A sink whose errors come late, of a thread or of a callback: the next call raises them."""

    _failure: Exception | None = None

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
