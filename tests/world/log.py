"""What a run logs, kept in lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from async_opd.core.samples import DeadLetter


@dataclass
class FakeLog:
    """A RunLog without files: ``lines`` are all messages, ``evaluated`` steps with evaluations."""

    steps: list[int] = field(default_factory=list)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.rows.append(dict(metrics))
        if any(key.startswith("eval") for key in metrics):
            self.evaluated.append(step)

    def summarize(self, metrics: Mapping[str, float]) -> None:
        self.summary |= metrics

    def waits(self, waits: Mapping[str, str]) -> None: ...
    def busy(self, pools: Mapping[str, Any]) -> None: ...

    def message(self, text: str, level: str = "info") -> None:
        self.lines.append(text)
        if level == "warning":
            self.warnings.append(text)

    def dead_letter(self, lost: DeadLetter) -> None:
        self.letters.append(lost)

    @property
    def last(self) -> dict[str, float]:
        """The last row."""
        return dict(self.rows[-1]) if self.rows else {}

    @property
    def dead(self) -> list[str]:
        """The uids of all dead letters."""
        return [one.header.uid for one in self.letters]

    @property
    def keys(self) -> set[str]:
        """All metrics of rows and summary."""
        return {*self.summary, *(key for row in self.rows for key in row)}
