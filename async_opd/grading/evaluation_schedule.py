"""Which evaluations a run has to make, and the step that each belongs to.

    version v is pushed ── due ──────► evaluation under v ──► logged at the step that made v
    the run is resumed ── missing ──► evaluation under the checkpoint's weights ──► at its step

Training goes on meanwhile: the step that it has reached when an evaluation ends says nothing about
the weights that were measured, and a resume would cut an evaluation that is logged there.
"""

from __future__ import annotations

from collections.abc import Mapping

from async_opd.accounting.run_state import Cut
from async_opd.config.run_config import RunConfig
from async_opd.core.stages import Log


class Evaluations:
    """``logged`` is the last step whose evaluation is in the metrics; -1 if there is none."""

    def __init__(self, config: RunConfig, log: Log, logged: int = -1) -> None:
        self._every, self._versions = config.eval.every, config.versions
        self._steps, self._sync_steps = config.train.steps, config.async_.sync_steps
        self._log = log
        self._logged = logged

    def step_of(self, version: int) -> int:
        """The step that completes the weights of a version."""
        return min(version * self._sync_steps, self._steps)

    def is_due(self, version: int) -> bool:
        """Whether the version has an evaluation of its own; the last one's comes after training."""
        return bool(self._every) and version % self._every == 0 and version < self._versions

    def is_missing(self, cut: Cut) -> bool:
        """Whether a run that goes on from here lacks its last evaluation before.

        It was interrupted while it measured. The weights of that version may be gone: those of the
        checkpoint are measured then, at the checkpoint's step.
        """
        if not self._every or cut.version >= self._versions:
            return False
        due = cut.version - cut.version % self._every
        return due > 0 and self._logged < self.step_of(due)

    @property
    def is_last_missing(self) -> bool:
        """Whether the evaluation after the last step is still to be made."""
        return self._logged < self._steps

    def log(self, metrics: Mapping[str, float], step: int, version: int) -> None:
        """Logs an evaluation at the step of the weights that it measured."""
        self._log.summarize(metrics)
        self._log.log(step, metrics)
        found = ", ".join(
            f"{key.removesuffix('/accuracy')} {value:.1%}"
            for key, value in metrics.items()
            if key.endswith("/accuracy")
        )
        self._log.message(f"step {step}, version {version}: {found}")
