"""The evaluations that a run has to make, and the step to which each belongs.

    version v is pushed ── due ──────► evaluation, from v on ──► logged at the step that made v
    the run is resumed ── missing ──► evaluation, from the checkpoint's weights on ──► at its step

Training goes on during an evaluation: the step at which the evaluation ends is not the step of the
weights that were measured, and a resume would cut an evaluation that was logged there.
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
        self._why: dict[int, str] = {}

    def step_of(self, version: int) -> int:
        """The step that completes the weights of a version."""
        return min(version * self._sync_steps, self._steps)

    def is_due(self, version: int) -> bool:
        """Whether the version is evaluated when it is pushed; the last one is after training."""
        return bool(self._every) and version % self._every == 0 and version < self._versions

    def is_missing(self, cut: Cut) -> bool:
        """Whether a run that resumes at the consistent cut lacks the last evaluation before it.

        It was interrupted during that evaluation. The weights of that version may not exist any
        more: the checkpoint's weights are measured instead, at the checkpoint's step.
        """
        if not self._every or cut.version >= self._versions:
            return False
        due = cut.version - cut.version % self._every
        return due > 0 and self._logged < self.step_of(due)

    @property
    def is_last_missing(self) -> bool:
        """Whether the evaluation after the last step is missing."""
        return self._logged < self._steps

    def has(self, step: int) -> bool:
        """Whether an evaluation of the weights after ``step``, or of later ones, is logged."""
        return step <= self._logged

    def skip(self, step: int, why: str) -> None:
        """Keeps why the weights after ``step`` have no evaluation, until the next one is logged."""
        self._why[step] = why

    def _name_missing(self, step: int) -> None:
        """Says which due evaluations before the one of ``step`` there will never be, and why."""
        due = (self.step_of(one) for one in range(1, self._versions) if self.is_due(one))
        missing = [at for at in due if self._logged < at < step]
        for at in (one for one in missing if one in self._why):
            self._log.message(f"step {at}: no evaluation, since {self._why[at]}")
        if others := [at for at in missing if at not in self._why]:
            first, last = others[0], others[-1]
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            why = "the run was interrupted, or eval.every was another"
            self._log.message(f"{steps}: no evaluation, since {why}; step {step} has the next one")

    def left_out(self, name: str, answers: int) -> None:
        """Says that a file of ``evals/`` lacks so many answers."""
        if answers:
            self._log.message(
                f"evals/{name}.jsonl lacks {answers} answers, which eval.samples_mib leaves no room"
            )

    def log(self, metrics: Mapping[str, float], step: int, version: int) -> None:
        """Logs an evaluation at the step of the oldest ``version`` that it measured."""
        self._log.summarize(metrics)
        self._log.log(step, metrics)
        newest = int(metrics.get("eval/newest_version", version))
        versions = f"versions {version} to {newest}" if newest > version else f"version {version}"
        if any(key.startswith("eval/") for key in metrics):
            self._name_missing(step)
            self._logged = max(self._logged, step)
        found = ", ".join(
            f"{key.removesuffix('/accuracy')} {value:.1%}"
            for key, value in metrics.items()
            if key.endswith("/accuracy")
        )
        self._log.message(f"step {step}, {versions}: {found}")
