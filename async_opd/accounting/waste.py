"""Tokens that were generated and scored, and trained nothing: by reason, and as a share.

    trained      samples of steps that changed the weights
    requeued     samples that were too stale when their turn came; their prompts are sampled again
    dead         dead letters (of one that was never finished its prompt), samples of skipped steps
    duplicated   second copies of a sample, after a lease expired or a stage died

Tokens are those of prompt and response, as in the header of a rollout. The unfinished work of a
dead replica has no header, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from async_opd.core.reports import StepReport
from async_opd.core.samples import Header


@dataclass
class Waste:
    """Sums since the start, or since the run was resumed."""

    trained: int = 0
    requeued: int = 0
    dead: int = 0
    duplicated: float = 0.0

    def step(self, report: StepReport) -> None:
        """Counts the samples of a step, and the duplicates that the trainer has dropped so far."""
        tokens = _tokens(report.trained)
        if report.skipped:
            self.dead += tokens
        else:
            self.trained += tokens
        self.duplicated = report.metrics.get("train/duplicate_tokens", 0.0)

    def stale(self, headers: Iterable[Header]) -> None:
        """Counts samples that are sampled again."""
        self.requeued += _tokens(headers)

    @property
    def metrics(self) -> dict[str, float]:
        """The sums, and ``waste/share`` = wasted / (wasted + trained); 0 before the first token."""
        wasted = self.requeued + self.dead + self.duplicated
        return {
            "waste/requeued_tokens": float(self.requeued),
            "waste/dead_tokens": float(self.dead),
            "waste/duplicated_tokens": self.duplicated,
            "waste/share": wasted / max(wasted + self.trained, 1),
        }


def _tokens(headers: Iterable[Header]) -> int:
    return sum(header.tokens for header in headers)
