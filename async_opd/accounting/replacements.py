"""What is sampled: prompts as they come, and what takes the place of rollouts that are lost.

    prompts ──► Prompt ──ledger──► groups to sample
       └──► DeadLetter: each of its rollouts a dead letter, and the next prompt
    lost rollout ──groups of one──► dead letter, one rollout of another prompt
       └──whole groups──► sampled again, up to MAX_RESAMPLED times; then the group's rollouts are
       dead
                          letters, none of them is waited for, another prompt's group is sampled

A rollout may have copies, of which one is lost and another one trained. The trainer decides which
it is: nothing is a dead letter before the trainer has agreed to let it go (``Trainer.drop``).

A stream that has only bad prompts, or a grader that always fails, ends the run: by the teachers'
``max_dead_letter_share``, or here by ``MAX_CONSECUTIVE_REFUSED``. It does so when every account is
right: a checkpoint of that moment can be resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from async_opd.accounting.admission import Admission
from async_opd.accounting.dead_letters import DeadLetters
from async_opd.accounting.ledger import Ledger
from async_opd.core.errors import StageError
from async_opd.core.samples import DeadLetter, Group, Prompt
from async_opd.core.stages import StepReport
from async_opd.core.uid import Uid

MAX_RESAMPLED = 2
"""How often a rollout that is lost is sampled again before its group is given up."""
MAX_CONSECUTIVE_REFUSED = 1000
"""Prompts without one that can be sampled."""


class ReplayablePrompts(Protocol):
    """A stream of prompts without end. ``find`` gives one again, by its uid."""

    @property
    def cursor(self) -> int: ...
    def next(self, count: int) -> list[Prompt | DeadLetter]: ...
    def find(self, uid: Uid) -> Prompt: ...


class DeadLetterLog(Protocol):
    """Where what is lost is told of."""

    def message(self, text: str) -> None: ...
    def dead_letter(self, lost: DeadLetter) -> None: ...
    def summarize(self, metrics: Mapping[str, float]) -> None: ...


class PromptSupply:
    """Takes prompts from a stream. ``whole_groups``: the size of groups that are trained whole."""

    def __init__(
        self,
        prompts: ReplayablePrompts,
        ledger: Ledger,
        admission: Admission,
        dead_letters: DeadLetters,
        log: DeadLetterLog,
        *,
        whole_groups: int | None,
    ) -> None:
        self._prompts = prompts
        self._ledger, self._admission = ledger, admission
        self._dead_letters, self._log = dead_letters, log
        self._group_size = whole_groups
        self._resampled: Counter[Uid] = Counter()
        self._told = False  # of the first that is sampled again
        self._ungraded: set[Uid] = set()
        self._fatal: StageError | None = None  # why the run has to end

    def groups(self, count: int, members: int | None = None) -> list[Group]:
        """The groups of the next prompts that can be sampled; they are in flight now.

        StageError if too many cannot.
        """
        prompts: list[Prompt] = []
        refused = 0
        while len(prompts) < count and self._fatal is None:
            for one in self._prompts.next(count - len(prompts)):
                if isinstance(one, Prompt):
                    prompts.append(one)
                    continue
                refused += 1
                for header in self._ledger.refused(one.header, members):
                    self._dead_letter(DeadLetter(header, one.reason, one.stage))
                if refused >= MAX_CONSECUTIVE_REFUSED:
                    cause = f"{refused} prompts and none of them can be sampled: {one.reason}"
                    remedy = "see dead_letters.jsonl, mend the data"
                    self._fatal = self._fatal or StageError("prompts", cause, remedy)
        groups = self._ledger.admitted(prompts, members)
        if self._fatal is not None:
            missing = count - len(prompts)
            self._admission.give_back(missing * (members or self._ledger.group_size))
            raise self._fatal
        return groups

    def complete(self) -> list[Group]:
        """Single rollouts for the places that a run which had to end left open in a group.

        Admission takes whole groups, and would wait for ever for the room of one.
        """
        places = -self._admission.admitted % self._ledger.group_size
        self._admission.readmit(places)
        return self.groups(places, members=1)

    def ended_by(self, lost: DeadLetter) -> tuple[Uid, ...]:
        """Uids that ``replace`` will make dead letters, the lost one first.

        Empty if a copy of it is trained or a dead letter, or if it is to be sampled again.
        """
        uid = lost.header.uid
        if not self._ledger.expects(lost.header):
            return ()
        if self._group_size is None:
            return (uid,)
        if self._resampled[uid] < MAX_RESAMPLED:
            return ()
        return (uid, *(one.uid for one in self._ledger.group_of(lost.header) if one.uid != uid))

    def replace(self, lost: DeadLetter) -> list[Group]:
        """What takes the place of a rollout that was lost; nothing if a copy had its fate before.

        It is admitted in the same place: the budget is not asked. The trainer must have let go of
        all that is ``ended_by`` it.
        """
        if not self._ledger.expects(lost.header):
            return []
        if self._group_size is None:
            self._ledger.dead_lettered(lost.header)
            self._dead_letter(lost)
            return self.groups(1, members=1)
        uid = lost.header.uid
        self._resampled[uid] += 1
        if self._resampled[uid] <= MAX_RESAMPLED:
            if not self._told:
                self._log.message(f"sampled again: {uid} ({lost.stage}): {lost.reason}")
            self._told = True
            return self._ledger.requeued([lost.header])
        return self._replace_group(lost)

    def skipped(self, report: StepReport) -> None:
        """Nothing was learned from a step: its samples are dead letters, whose place is used."""
        uids = ", ".join(header.uid for header in report.trained)
        self._log.message(f"step {report.step} left out: {report.skipped}; samples: {uids}")
        reason = f"step {report.step} was left out: {report.skipped}"
        for header in report.trained:
            self._ledger.dead_lettered(header)
            self._log_dead_letter(DeadLetter(header, reason, "trainer"))
        self._dead_letters.skipped(len(report.trained))

    def ungraded(self, lost: Iterable[DeadLetter]) -> None:
        """Answers of an evaluation that could not be graded. A prompt counts once.

        StageError if they are too many.
        """
        for one in lost:
            if one.header.uid not in self._ungraded:
                self._ungraded.add(one.header.uid)
                self._log.dead_letter(one)
                self._count(one)
        if self._fatal is not None:
            raise self._fatal

    def _replace_group(self, lost: DeadLetter) -> list[Group]:
        reason = f"{lost.header.uid} of its group is lost: {lost.reason}"
        others = [one for one in self._ledger.group_of(lost.header) if one.uid != lost.header.uid]
        for one in (lost, *(DeadLetter(header, reason, "group") for header in others)):
            del self._resampled[one.header.uid]
            self._ledger.dead_lettered(one.header)
            self._dead_letter(one)
        return self.groups(1)

    def _dead_letter(self, lost: DeadLetter) -> None:
        self._log_dead_letter(lost)
        self._count(lost)

    def _count(self, lost: DeadLetter) -> None:
        try:
            self._dead_letters.add(lost)
        except StageError as error:
            self._fatal = self._fatal or error

    def _log_dead_letter(self, lost: DeadLetter) -> None:
        """The summary has the count too, should nothing be logged after it."""
        count = self._ledger.counts["dead_lettered"]
        self._log.summarize({"ledger/dead_lettered": float(count)})
        self._log.dead_letter(lost)
