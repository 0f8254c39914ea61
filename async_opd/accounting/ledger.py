"""What became of every admitted sample: in flight, then trained or dead-lettered, exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from async_opd.core.errors import StageError
from async_opd.core.samples import NO_VERSION, Group, Header, Prompt
from async_opd.core.uid import Uid, member_of, prompt_uid, rollout_uid


class JournalWriter(Protocol):
    """Where the ledger writes down what happens. See ``async_opd.accounting.journal``."""

    def admitted(self, uids: Iterable[Uid]) -> None: ...
    def trained(self, step: int, uids: Iterable[Uid]) -> None: ...
    def dead(self, uid: Uid) -> None: ...


class NullJournal:
    """Writes nothing down."""

    def admitted(self, uids: Iterable[Uid]) -> None: ...
    def trained(self, step: int, uids: Iterable[Uid]) -> None: ...
    def dead(self, uid: Uid) -> None: ...


@dataclass(frozen=True)
class LedgerState:
    """The ledger at one moment, for a checkpoint: uids only, prompts are found again by theirs."""

    in_flight: tuple[Uid, ...] = ()
    trained: int = 0
    requeued: int = 0
    buried: tuple[Uid, ...] = ()


class Ledger:
    """Accounts for rollouts by uid. A sample that is unknown or comes twice stops the run."""

    def __init__(self, group_size: int, journal: JournalWriter | None = None) -> None:
        self.group_size = group_size
        self._journal = journal or NullJournal()
        self._in_flight: dict[Uid, Prompt] = {}
        self._trained = 0
        self._requeued = 0
        self._dead: set[Uid] = set()

    def admitted(self, prompts: Iterable[Prompt], members: int | None = None) -> list[Group]:
        """The prompts' groups are in flight: whole ones, or their first ``members``."""
        size = self.group_size if members is None else members
        groups = [Group(prompt, tuple(range(size))) for prompt in prompts]
        new = {rollout_uid(g.prompt.uid, member): g.prompt for g in groups for member in g.members}
        self._in_flight |= new
        if new:
            self._journal.admitted(new)
        return groups

    def refused(self, prompt: Header, members: int | None = None) -> list[Header]:
        """The rollouts of a prompt that cannot be sampled: admitted, and dead letters at once."""
        size = self.group_size if members is None else members
        headers = [replace(prompt, uid=rollout_uid(prompt.uid, member)) for member in range(size)]
        self._journal.admitted([header.uid for header in headers])
        for header in headers:
            self._record_dead(header)
        return headers

    def requeued(self, headers: Iterable[Header]) -> list[Group]:
        """The samples came too late: what to run again. They stay in flight, and admitted."""
        groups = []
        for header in headers:
            if not self.expects(header):
                continue  # another copy of it was trained or buried meanwhile
            prompt = self._known(header)
            groups.append(Group(prompt, (member_of(header.uid),)))
        self._requeued += len(groups)
        return groups

    def expects(self, header: Header) -> bool:
        """Whether the sample is in flight; if not, it came before."""
        return header.uid in self._in_flight

    def group_of(self, header: Header) -> list[Header]:
        """All samples in flight of the same prompt, the given one among them."""
        prompt = self._known(header)
        tokens = len(prompt.token_ids)
        mine = (rollout_uid(prompt.uid, member) for member in range(self.group_size))
        return [
            Header(uid, tokens, 0, NO_VERSION, prompt.teacher)
            for uid in mine
            if uid in self._in_flight
        ]

    def dead_lettered(self, header: Header) -> None:
        """The sample will never be trained."""
        self._known(header)
        del self._in_flight[header.uid]
        self._record_dead(header)

    def _record_dead(self, header: Header) -> None:
        self._dead.add(header.uid)
        self._journal.dead(header.uid)

    def trained(self, headers: Collection[Header], step: int) -> None:
        """The samples of a step are trained.

        StageError for one that is not in flight: then none of them counts, and no checkpoint may
        hold these weights.
        """
        for header in headers:
            self._known(header)
        if len({header.uid for header in headers}) < len(headers):
            raise StageError("ledger", f"step {step} trained a sample twice", BUG)
        for header in headers:
            del self._in_flight[header.uid]
        self._trained += len(headers)
        self._journal.trained(step, [header.uid for header in headers])

    def state(self) -> LedgerState:
        """Everything, for a checkpoint."""
        return LedgerState(
            tuple(self._in_flight),
            self._trained,
            self._requeued,
            tuple(sorted(self._dead)),
        )

    def restore(self, state: LedgerState, find: Callable[[Uid], Prompt]) -> None:
        """The accounts of a checkpoint; ``find(uid)`` gives a prompt again."""
        prompts: dict[Uid, Prompt] = {}
        for uid in state.in_flight:
            name = prompt_uid(uid)
            if name not in prompts:
                prompts[name] = find(name)
            self._in_flight[uid] = prompts[name]
        self._trained, self._requeued = state.trained, state.requeued
        self._dead = set(state.buried)

    def unfinished_groups(self, finished: Collection[Uid]) -> list[Group]:
        """What is in flight and not ``finished`` as groups, to be sampled again after a restart."""
        members: defaultdict[Uid, list[Uid]] = defaultdict(list)
        for uid in self._in_flight:
            if uid not in finished:
                members[prompt_uid(uid)].append(uid)
        return [
            Group(self._in_flight[uids[0]], tuple(map(member_of, uids)))
            for uids in members.values()
        ]

    def _known(self, header: Header) -> Prompt:
        prompt = self._in_flight.get(header.uid)
        if prompt is None:
            raise StageError(
                "ledger",
                f"sample {header.uid} came out of the pipeline but is not in flight: it came "
                "twice, is a dead letter, or was never admitted",
                BUG,
            )
        return prompt

    @property
    def counts(self) -> dict[str, int]:
        """Samples in each state; ``requeued`` counts how often one went back, and is no state."""
        return {
            "in_flight": len(self._in_flight),
            "trained": self._trained,
            "dead_lettered": len(self._dead),
            "requeued": self._requeued,
        }


BUG = "this is a bug of async_opd; please report it with the run's log"
