"""The driver's state of a run, and the consistent cut of it that a checkpoint holds.

admission   the budget of samples that may start    ledger        the outcome of each rollout
supply      the groups to sample                    dead letters  counts against their limits
guardrail   the limits of truncated, growing and repetitive responses
images      those that the queue holds for prompts in flight

Tokens that were generated and scored, and trained nothing: by reason, and as a share.

    trained      samples of steps that changed the weights
    requeued     samples that were too stale when their turn came; their prompts are sampled again
    dead         dead letters (of one that was never finished its prompt), samples of skipped steps
    duplicated   second copies of a sample, after a lease expired or a stage died

Tokens are those of prompt and response, as in the header of a rollout. The unfinished work of a
dead replica has no header, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from async_opd.accounting.admission import Admission
from async_opd.accounting.dead_letters import DeadLetters, DeadLettersState
from async_opd.accounting.guardrail import Guardrail, GuardrailState
from async_opd.accounting.images import ImagesInFlight
from async_opd.accounting.journal import Journal
from async_opd.accounting.ledger import Ledger, LedgerState
from async_opd.accounting.lineage import Lineage
from async_opd.accounting.replacements import PromptSupply, ReplayablePrompts
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.core.errors import StageError
from async_opd.core.reports import Captured, StepReport
from async_opd.core.samples import Header
from async_opd.core.stages import Log

FIRST = 64
"""Episodes after which tools have been called, unless calls cannot be read."""
MAX_COLLATERAL = 0.01
"""Share of the episodes above which more processes are advised."""
COLLATERAL, EPISODES = "rollout/collateral", "rollout/episodes"


class EpisodeWatch:
    """Warns about the episodes of a run with an environment, once by each warning.

    It reads headers of trained episodes, and metrics of the pools.
    """

    def __init__(self, environment: EnvironmentConfig | None) -> None:
        self._environment = environment
        self._seen = self._calls = self._malformed = 0
        self._begun_again = False

    def observe(self, trained: Iterable[Header], metrics: Mapping[str, float]) -> Iterator[str]:
        """The warnings that a step gives."""
        if self._environment is None:
            return
        before = self._seen
        for facts in (header.episode for header in trained):
            if facts is not None:
                self._seen += 1
                self._calls += facts.calls
                self._malformed += facts.malformed
        if before < FIRST <= self._seen and self._environment.has_tools and not self._calls:
            yield (
                f"no call of a tool was read in the first {self._seen} episodes, and "
                f"{self._malformed} could not be read: calls are read in the form in which the "
                "student's chat template writes them → async_opd check --episodes 4 shows turns; "
                "a cold start teaches the form (cold_start.answers: teacher)"
            )
        again, begun = metrics.get(COLLATERAL, 0.0), metrics.get(EPISODES, 0.0)
        if not self._begun_again and again > MAX_COLLATERAL * max(begun, 100):
            self._begun_again = True
            yield (
                f"{again:.0f} of {begun:.0f} episodes began again because another one in their "
                "process hung or died → raise environment.processes (now "
                f"{self._environment.processes}), or make the environment quicker"
            )


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


@dataclass(frozen=True)
class Cut:
    """The driver's part of a consistent cut: its state at one moment between two optimizer steps.

    A sample is trained (counted in ``ledger``), or in flight; of the latter the trainer's files
    hold those that are scored. ``cursor`` is the position in the prompt stream, ``admitted`` the
    samples that count against the budget, ``files`` the sizes of the append-only files in bytes,
    ``lineage`` that of the run until then.
    """

    step: int
    version: int
    cursor: int
    admitted: int
    ledger: LedgerState
    dead_letters: DeadLettersState = field(default_factory=DeadLettersState)
    guardrail: GuardrailState = field(default_factory=GuardrailState)
    files: dict[str, int] = field(default_factory=dict)
    lineage: Lineage = ()


class RunState:
    """The state at the start of a run, or of a checkpoint. ``step`` is the last one settled."""

    def __init__(
        self,
        config: RunConfig,
        prompts: ReplayablePrompts,
        log: Log,
        journal: Journal | None = None,
        start: Cut | None = None,
    ) -> None:
        """``prompts`` stand at the cursor of ``start``."""
        self._config = config
        self._prompts, self._first = prompts, 0 if start is None else start.cursor
        self.admission = Admission(
            batch_size=config.train.batch_size,
            sync_steps=config.async_.sync_steps,
            staleness_threshold=config.async_.staleness_threshold,
            steps=config.train.steps,
        )
        self.ledger = Ledger(config.rollout.n, journal)
        self.images = ImagesInFlight(
            self.ledger, config.train.batch_size, config.queue.max_image_mib << 20
        )
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
        self.episodes = EpisodeWatch(config.environment)
        self.guardrail = Guardrail(
            config.guardrail,
            quantized=config.rollout.engine.scheme is not None
            or config.sync.fake_quantization is not None,
        )
        self.waste = Waste()
        self.step = 0
        if start is not None:
            self._restore(start)

    def _restore(self, cut: Cut) -> None:
        """Takes over a checkpoint's state."""
        # Before the trainer has the weights: a run interrupted until then must keep this state.
        self.step = cut.step
        self.ledger.restore(cut.ledger, self._prompts.find)
        self.dead_letters.restore(cut.dead_letters)
        self.guardrail.state = cut.guardrail
        self.admission.restore(cut.version, cut.admitted)

    def settle(self, report: StepReport) -> None:
        """Records a step's samples as trained, or as dead letters if the step was skipped."""
        self.waste.step(report)
        if report.skipped:
            self.supply.skipped(report)
        else:
            self.ledger.trained(report.trained, report.step)
            self.dead_letters.trained(report.trained)
        self.step = report.step

    def cut(self, captured: Captured) -> Cut:
        """The cut that belongs to captured weights. StageError if the trainer's step differs."""
        if captured.step != self.step:
            raise StageError(
                "checkpoint", f"the trainer is at step {captured.step}, the ledger at {self.step}"
            )
        return Cut(
            step=captured.step,
            version=self._config.version_after(captured.step),
            cursor=self._first + self.supply.taken,  # beyond it the stream was only read
            admitted=self.admission.admitted,
            ledger=self.ledger.state(),
            dead_letters=self.dead_letters.state(),
            guardrail=self.guardrail.state,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all parts of the state."""
        return {
            **self.guardrail.metrics,
            "sync/version": float(self.admission.version),
            "rollout/admitted": float(self.admission.admitted),
            **{f"ledger/{state}": float(count) for state, count in self.ledger.counts.items()},
            **self._prompts.metrics,
            **self.dead_letters.metrics,
            **self.waste.metrics,
            **self.images.metrics,
        }
