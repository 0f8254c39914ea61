"""The prompt supply gives the groups to sample, and replacements for rollouts that failed.

    prompts ──read, by a thread──► in hand ──► Prompt ──ledger──► groups to sample
                                      └──► DeadLetter: each of its rollouts a dead letter
    failed rollout ──groups of one──► dead letter, one rollout of another prompt
       └──whole groups──► resampled up to MAX_RESAMPLED times; then all rollouts of its group are
                          dead letters, and another prompt's group is sampled

Of two copies of a rollout one may fail and the other be trained. The trainer decides: no rollout
becomes a dead letter before the trainer has agreed to drop it (``Trainer.drop``).

A stream of bad prompts only, or a grader that always fails, ends the run: by the teachers'
``max_dead_letter_share``, or here by ``MAX_CONSECUTIVE_REFUSED``. The error is raised when the
run state is consistent, so that a checkpoint of that moment can be resumed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from async_opd.accounting.admission import Admission
from async_opd.accounting.dead_letters import DeadLetters
from async_opd.accounting.ledger import Ledger
from async_opd.core.bounded import BoundedDict
from async_opd.core.errors import SourceError, StageError
from async_opd.core.reports import StepReport
from async_opd.core.samples import DeadLetter, Group, Header, Prompt
from async_opd.core.stages import Log
from async_opd.core.uid import Uid

MAX_RESAMPLED = 2
"""Times that a failed rollout is resampled before its group is dead-lettered."""
MAX_CONSECUTIVE_REFUSED = 1000
"""Bad prompts before a good one, in one call of ``groups``, that end the run."""
TOO_OFTEN_STALE = 3
"""Times that a rollout comes too late for the trainer when the log gets a warning of it."""
REMEMBERED_STALE = 1 << 16
"""Rollouts that came too late last, whose times are counted."""


class ReplayablePrompts(Protocol):
    """An endless stream of prompts. ``find`` looks up an earlier prompt by its uid."""

    @property
    def metrics(self) -> dict[str, float]: ...
    def next(self, count: int) -> list[Prompt | DeadLetter]: ...
    def find(self, uid: Uid) -> Prompt: ...


@dataclass(eq=False)
class PromptSupply:
    """Takes prompts from a stream. ``whole_groups``: the size of groups, if trained whole."""

    prompts: ReplayablePrompts
    ledger: Ledger
    admission: Admission
    dead_letters: DeadLetters
    log: Log
    _: KW_ONLY
    whole_groups: int | None
    taken: int = field(default=0, init=False)
    """Entries of the stream that were admitted or refused: those in hand are not among them."""
    _in_hand: deque[Prompt | DeadLetter] = field(default_factory=deque, init=False)
    _unread: SourceError | None = field(default=None, init=False)
    """Why there is nothing to read after what is in hand."""
    _resampled: Counter[Uid] = field(default_factory=Counter, init=False)
    _logged_resampling: bool = field(default=False, init=False)
    """Only the first resampled rollout gets a message."""
    _stale: BoundedDict[Uid, int] = field(
        default_factory=lambda: BoundedDict(REMEMBERED_STALE), init=False
    )
    """Times that each rollout came too late."""
    _ungraded: set[Uid] = field(default_factory=set, init=False)
    _fatal: StageError | None = field(default=None, init=False)
    """The error that ends the run, raised when the run state is consistent."""

    def read(self, count: int) -> None:
        """Reads until ``count`` good prompts are in hand, or what ends the run is.

        It may block: a thread calls it, while no other thread calls a method that returns groups.
        Groups in hand are not admitted; a run that goes on from a checkpoint reads them again.
        """
        while lacking := self._lacking(count):
            try:
                self._in_hand.extend(self.prompts.next(lacking))
            except SourceError as error:
                self._unread = error

    def has(self, count: int) -> bool:
        """Whether there is nothing to read for ``groups`` of so many prompts."""
        return not self._lacking(count)

    def _lacking(self, count: int) -> int:
        """The good prompts that ``read`` has to read."""
        good = sum(isinstance(one, Prompt) for one in self._in_hand)
        ends = self._unread is not None or self._fatal is not None
        if ends or len(self._in_hand) - good >= MAX_CONSECUTIVE_REFUSED:
            return 0
        return max(0, count - good)

    def groups(self, count: int, members: int | None = None) -> list[Group]:
        """Puts ``count`` further groups in flight, whole or only their first ``members`` rollouts.

        It reads the prompts that are not in hand, and may block then. StageError if there are too
        many bad prompts, or dead letters, or a source cannot be read.
        """
        self.read(count)
        prompts: list[Prompt] = []
        refused = 0
        while len(prompts) < count and self._fatal is None:
            if not self._in_hand:
                remedy = "make the source readable again, then go on with --resume"
                self._fatal = StageError("prompts", str(self._unread), remedy)
                break
            one = self._in_hand.popleft()
            self.taken += 1
            if isinstance(one, Prompt):
                prompts.append(one)
                continue
            refused += 1
            for header in self.ledger.refused(one.header, members):
                self._dead_letter(DeadLetter(header, one.reason, one.stage))
            if refused >= MAX_CONSECUTIVE_REFUSED:
                cause = f"{refused} prompts cannot be sampled; the last: {one.reason}"
                remedy = "see dead_letters.jsonl, correct the data"
                self._fatal = self._fatal or StageError("prompts", cause, remedy)
        groups = self.ledger.admitted(prompts, members)
        if self._fatal is not None:
            # The prompts in hand are in flight, the missing ones give their slots back: only now
            # do ledger and budget agree, and the error may be raised.
            missing = count - len(prompts)
            self.admission.give_back(missing * (members or self.ledger.group_size))
            raise self._fatal
        return groups

    @property
    def free_slots(self) -> int:
        """The slots of a broken group, which a failed run may leave free."""
        return -self.admission.admitted % self.ledger.group_size

    def complete(self) -> list[Group]:
        """Single rollouts for the ``free_slots``.

        Admission takes whole groups, and would wait forever for the room of one.
        """
        slots = self.free_slots
        self.admission.readmit(slots)
        return self.groups(slots, members=1)

    def ended_by(self, dead: DeadLetter) -> tuple[Uid, ...]:
        """Uids that ``replace`` will make dead letters, the given one first.

        Empty if a copy of it is trained or a dead letter, or if it will be resampled.
        """
        uid = dead.header.uid
        if not self.ledger.expects(dead.header):
            return ()
        if self.whole_groups is None:
            return (uid,)
        if self._resampled[uid] < MAX_RESAMPLED:
            return ()
        return (uid, *(one.uid for one in self.ledger.group_of(dead.header) if one.uid != uid))

    def replace(self, dead: DeadLetter) -> list[Group]:
        """Groups that replace a failed rollout; none if a copy of it is trained or a dead letter.

        They take over its slot of the budget. The trainer must have dropped what is ``ended_by``
        it. StageError as ``groups``.
        """
        if not self.ledger.expects(dead.header):
            return []
        if self.whole_groups is None:
            self.ledger.dead_lettered(dead.header)
            self._dead_letter(dead)
            return self.groups(1, members=1)
        uid = dead.header.uid
        self._resampled[uid] += 1
        if self._resampled[uid] <= MAX_RESAMPLED:
            if not self._logged_resampling:
                self.log.message(f"resampled: {uid} ({dead.stage}): {dead.reason}")
            self._logged_resampling = True
            return self.ledger.requeued([dead.header])
        return self._replace_group(dead)

    def stale(self, headers: Iterable[Header]) -> list[Group]:
        """Groups of one that sample rollouts again which came too late for the trainer.

        None for a copy of one that is trained or a dead letter. A rollout that comes too late again
        and again is one warning: it lasts longer than the bound allows.
        """
        expected = [header for header in headers if self.ledger.expects(header)]
        for header in expected:
            self._stale[header.uid] = times = self._stale.get(header.uid, 0) + 1
            if times == TOO_OFTEN_STALE:
                self.log.message(
                    f"{header.uid} was sampled {times} times and came too late each time, the last "
                    f"time with {header.tokens} tokens of prompt and response: it lasts longer "
                    "than async.max_version_lag allows, and each time is wasted → raise "
                    "async.max_version_lag or async.sync_steps, lower rollout.max_tokens, or set "
                    "async.on_stale to mask",
                    "warning",
                )
        return self.ledger.requeued(expected)

    def skipped(self, report: StepReport) -> None:
        """Dead-letters the samples of a skipped step; their slots of the budget stay used."""
        uids = ", ".join(header.uid for header in report.trained)
        self.log.message(f"step {report.step} was skipped: {report.skipped}; samples: {uids}")
        reason = f"step {report.step} was skipped: {report.skipped}"
        for header in report.trained:
            self.ledger.dead_lettered(header)
            self._log_dead_letter(DeadLetter(header, reason, "trainer"))
        self.dead_letters.skipped(len(report.trained))

    def ungraded(self, failures: Iterable[DeadLetter]) -> None:
        """Logs and counts evaluation responses without a grade; each prompt counts once.

        StageError if there are too many.
        """
        for one in failures:
            if one.header.uid not in self._ungraded:
                self._ungraded.add(one.header.uid)
                self.log.dead_letter(one)
                self._count(one)
        if self._fatal is not None:
            raise self._fatal

    def _replace_group(self, dead: DeadLetter) -> list[Group]:
        reason = f"{dead.header.uid} of its group is a dead letter: {dead.reason}"
        others = [one for one in self.ledger.group_of(dead.header) if one.uid != dead.header.uid]
        for one in (dead, *(DeadLetter(header, reason, "group") for header in others)):
            del self._resampled[one.header.uid]
            self.ledger.dead_lettered(one.header)
            self._dead_letter(one)
        return self.groups(1)

    def _dead_letter(self, dead: DeadLetter) -> None:
        self._log_dead_letter(dead)
        self._count(dead)

    def _count(self, dead: DeadLetter) -> None:
        try:
            self.dead_letters.add(dead)
        except StageError as error:
            self._fatal = self._fatal or error

    def _log_dead_letter(self, dead: DeadLetter) -> None:
        """Logs a dead letter; the summary gets the count now: no step may be logged after it."""
        count = self.ledger.counts["dead_lettered"]
        self.log.summarize({"ledger/dead_lettered": float(count)})
        self.log.dead_letter(dead)
