"""Counts of rollouts that will never be trained, against the share that is allowed. By stage:

prompt   the prompt cannot be tokenized, or not within its limit: all of its rollouts count
student  the engine refuses the prompt, or returns log-probabilities that are not finite
grader   the grader raises, or returns no number from 0 to 1
teacher  no replica can score the rollout
group    another rollout of the group is a dead letter, where groups are trained whole
trainer  the queue has lost an image of the sample; or the step was skipped
         (train.on_nonfinite: skip), which counts against no share
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from async_opd.core.errors import StageError
from async_opd.core.samples import NO_TEACHER, DeadLetter, Header

MIN_ROLLOUTS = 1000
"""A share is taken of at least this many rollouts, so that the first dead letter ends no run."""


@dataclass(frozen=True)
class DeadLettersState:
    """The counts by teacher and by stage, for a checkpoint."""

    trained: dict[str, int] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)
    by_stage: dict[str, int] = field(default_factory=dict)


class DeadLetters:
    """Counts by teacher and by stage; ``max_shares[teacher]`` bounds a teacher's dead letters."""

    def __init__(self, max_shares: Mapping[str, float]) -> None:
        self._max_shares = dict(max_shares)
        self.restore(DeadLettersState())

    def state(self) -> DeadLettersState:
        """The counts now."""
        return DeadLettersState(dict(self._trained), dict(self._dead), dict(self._by_stage))

    def restore(self, state: DeadLettersState) -> None:
        """Takes over the counts of a checkpoint."""
        self._trained, self._dead = Counter(state.trained), Counter(state.dead)
        self._by_stage = Counter(state.by_stage)

    def trained(self, headers: Iterable[Header]) -> None:
        """Counts the samples of a trained step, of which dead letters are a share."""
        self._trained.update(header.teacher for header in headers)

    def skipped(self, count: int) -> None:
        """Counts the samples of a skipped step."""
        self._by_stage["trainer"] += count

    def add(self, dead: DeadLetter) -> None:
        """Counts one more. StageError beyond max_share · max(dead + trained, MIN_ROLLOUTS).

        Rows without a teacher count together, against the smallest share, of what all have trained.
        """
        teacher = dead.header.teacher
        self._by_stage[dead.stage] += 1
        self._dead[teacher] += 1
        count, trained = self._dead[teacher], self._trained[teacher]
        whose, key = f"of teacher {teacher}", teacher
        if teacher == NO_TEACHER:
            key = min(self._max_shares, key=lambda name: self._max_shares[name])
            whose, trained = "without a teacher", self._trained.total()
        of = max(count + trained, MIN_ROLLOUTS)
        allowed = self._max_shares[key] * of
        if count > allowed:
            raise StageError(
                f"teacher {teacher}" if dead.stage == "teacher" else dead.stage,
                f"{count} rollouts {whose} are dead letters; allowed are "
                f"{allowed:g} ({self._max_shares[key]:g} of {of}). The last, "
                f"{dead.header.uid}: {dead.reason}",
                "see dead_letters.jsonl for all of them, or raise "
                f"teachers.{key}.max_dead_letter_share",
            )

    @property
    def metrics(self) -> dict[str, float]:
        """``dead_letters/<stage>``: the dead letters of each stage."""
        return {f"dead_letters/{stage}": float(n) for stage, n in sorted(self._by_stage.items())}
