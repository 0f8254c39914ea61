"""Where a run's metrics and messages go, besides its files: the console, wandb, the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from async_opd.core.stages import Interval

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True)
class Summary:
    """How a run ended: the content of ``summary.json``, where metrics stand beside the rest.

    ``steps`` is the last step that was logged, ``seconds`` the time since the log was opened,
    ``metrics`` the last value of every metric (the summarized ones win).
    """

    status: Status
    error: str | None
    steps: int
    seconds: float
    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)


class Sink(Protocol):
    """A place that may fail: RunLog reports what its methods raise, and the run goes on.

    ``start`` comes first and ``close`` last. A sink whose ``start`` raised is not called again.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def start(self) -> str | None:
        """Opens the sink. What people should know of it, if it is not as they asked."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step; a step may come several times, with other metrics."""

    def rewind(self) -> None:
        """Steps come again: the run goes on from a checkpoint."""

    def waits(self, waits: Mapping[str, str]) -> None:
        """Takes what each pool waits for ('' if it computes)."""

    def busy(self, pools: Mapping[str, Sequence[Interval]]) -> None:
        """Takes when each pool computed since the last call."""

    def message(self, text: str) -> None:
        """Takes a line for people."""

    def close(self, summary: Summary) -> str | None:
        """The run ended. What people should know of what the sink has, if it is not all."""
