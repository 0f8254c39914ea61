"""What will never be trained, counted in rollouts, against what is allowed.

prompt   cannot be tokenized, or not within its limit: all rollouts that it would have had
student  the engine refuses it, or answers with log-probabilities that are not finite
grader   raises, or returns no number from 0 to 1
teacher  no replica can score it
group    another rollout of its group is lost, where groups are trained whole
trainer  its step was left out (train.on_nonfinite: skip); counted, and not against a share
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from async_opd.core.errors import StageError
from async_opd.core.samples import DeadLetter, Header

AT_LEAST = 1000
"""Rollouts that a share is taken of, before a teacher has had so many."""


@dataclass(frozen=True)
class DeadLettersState:
    """The counts by teacher, for a checkpoint."""

    trained: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    by_stage: dict[str, int] = field(default_factory=dict)


class DeadLetters:
    """Counts by teacher and by stage. ``max_shares[teacher]`` is the share that may be lost."""

    def __init__(self, max_shares: Mapping[str, float]) -> None:
        self._max_shares = dict(max_shares)
        self._trained: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._by_stage: Counter[str] = Counter()

    def state(self) -> DeadLettersState:
        """The counts."""
        return DeadLettersState(dict(self._trained), dict(self._lost), dict(self._by_stage))

    def restore(self, state: DeadLettersState) -> None:
        """The counts of a checkpoint."""
        self._trained, self._lost = Counter(state.trained), Counter(state.lost)
        self._by_stage = Counter(state.by_stage)

    def trained(self, headers: Iterable[Header]) -> None:
        """These were scored and trained."""
        self._trained.update(header.teacher for header in headers)

    def skipped(self, count: int) -> None:
        """So many were in steps that were left out."""
        self._by_stage["trainer"] += count

    def add(self, lost: DeadLetter) -> None:
        """One more. StageError if that is more than max_share · max(lost + trained, 1000)."""
        teacher = lost.header.teacher
        self._by_stage[lost.stage] += 1
        self._lost[teacher] += 1
        count = self._lost[teacher]
        of = max(count + self._trained[teacher], AT_LEAST)
        allowed = self._max_shares[teacher] * of
        if count > allowed:
            raise StageError(
                f"teacher {teacher}" if lost.stage == "teacher" else lost.stage,
                f"{count} rollouts of teacher {teacher} are dead letters; allowed are "
                f"{allowed:g} ({self._max_shares[teacher]:g} of {of}). The last, "
                f"{lost.header.uid}: {lost.reason}",
                "see dead_letters.jsonl for all of them, or raise "
                f"teachers.{teacher}.max_dead_letter_share",
            )

    @property
    def metrics(self) -> dict[str, float]:
        """``dead_letters/<stage>``: how many each stage gave up."""
        return {f"dead_letters/{stage}": float(n) for stage, n in sorted(self._by_stage.items())}
