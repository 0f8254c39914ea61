"""The driver's accounts of a run, and what a checkpoint holds of them.

admission     what may start               ledger        what became of each rollout
supply        what is sampled              dead letters  what will never be trained
guardrail     what responses turn into
"""

from __future__ import annotations

from async_opd.accounting.admission import Admission
from async_opd.accounting.cut import Cut
from async_opd.accounting.dead_letters import DeadLetters
from async_opd.accounting.guardrail import Guardrail
from async_opd.accounting.ledger import JournalWriter, Ledger
from async_opd.accounting.replacements import DeadLetterLog, PromptSupply, ReplayablePrompts
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError
from async_opd.core.stages import Captured, StepReport


class RunState:
    """As at the start of a run, or as a checkpoint has them. ``step`` is the last one settled."""

    def __init__(
        self,
        config: RunConfig,
        prompts: ReplayablePrompts,
        log: DeadLetterLog,
        journal: JournalWriter | None = None,
        start: Cut | None = None,
    ) -> None:
        """``prompts`` stand at the cursor of ``start``."""
        self._config = config
        self._prompts = prompts
        self.admission = Admission(
            batch_size=config.train.batch_size,
            sync_steps=config.async_.sync_steps,
            staleness_threshold=config.async_.staleness_threshold,
            steps=config.train.steps,
        )
        self.ledger = Ledger(config.rollout.n, journal)
        self.dead_letters = DeadLetters(
            {name: teacher.max_dead_letter_share for name, teacher in config.teachers.items()}
        )
        self.supply = PromptSupply(
            prompts,
            self.ledger,
            self.admission,
            self.dead_letters,
            log,
            whole_groups=config.rollout.n if config.reward is not None else None,
        )
        self.guardrail = Guardrail(config.guardrail)
        self.step = 0
        if start is not None:
            self._restore(start)

    def _restore(self, cut: Cut) -> None:
        """At once: a run interrupted before its trainer has the weights must not lose them."""
        self.step = cut.step
        self.ledger.restore(cut.ledger, self._prompts.find)
        self.dead_letters.restore(cut.dead_letters)
        self.guardrail.restore(cut.guardrail)
        self.admission.restore(cut.version, cut.admitted)

    def settle(self, report: StepReport) -> None:
        """What became of a step's samples."""
        if report.skipped:
            self.supply.skipped(report)
        else:
            self.ledger.trained(report.trained, report.step)
            self.dead_letters.trained(report.trained)
        self.step = report.step

    def cut(self, captured: Captured) -> Cut:
        """What belongs to the captured weights.

        Whoever was interrupted may not have heard of the trainer's last step: it counts, and opens
        the version that it completes. StageError if the trainer is at any other step.
        """
        if captured.step == self.step + 1:
            report = StepReport(captured.step, captured.trained, (), {}, skipped=captured.skipped)
            self.settle(report)
        if captured.step != self.step:
            raise StageError(
                "checkpoint", f"the trainer is at step {captured.step}, the ledger at {self.step}"
            )
        return Cut(
            step=captured.step,
            version=self._config.version_after(captured.step),
            cursor=self._prompts.cursor,
            admitted=self.admission.admitted,
            ledger=self.ledger.state(),
            dead_letters=self.dead_letters.state(),
            guardrail=self.guardrail.state(),
        )

    @property
    def metrics(self) -> dict[str, float]:
        """How they stand."""
        return {
            **self.guardrail.metrics,
            "sync/version": float(self.admission.version),
            "rollout/admitted": float(self.admission.admitted),
            **{f"ledger/{state}": float(count) for state, count in self.ledger.counts.items()},
            **self.dead_letters.metrics,
        }
