"""The ledger: every admitted sample is in flight, then trained or dead-lettered, exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from async_opd.accounting.journal import Journal
from async_opd.core.errors import ConfigError, Problem, StageError
from async_opd.core.samples import NO_VERSION, Group, Header, Prompt
from async_opd.core.uid import Uid, member_of, prompt_uid, rollout_uid


@dataclass(frozen=True)
class LedgerState:
    """The ledger at one moment, for a checkpoint: only uids; prompts are looked up by theirs.

    ``images`` are the SHA-256 of the images of each prompt in flight that has any.
    """

    in_flight: tuple[Uid, ...] = ()
    trained: int = 0
    requeued: int = 0
    dead_lettered: tuple[Uid, ...] = ()
    images: dict[Uid, tuple[str, ...]] = field(default_factory=dict)


class Ledger:
    """Accounts for samples by uid. A StageError for an unknown or repeated sample stops the run."""

    def __init__(self, group_size: int, journal: Journal | None = None) -> None:
        self.group_size = group_size
        self._journal = journal
        self._in_flight: dict[Uid, Prompt] = {}
        self._trained = 0
        self._requeued = 0
        self._dead: set[Uid] = set()

    def admitted(self, prompts: Iterable[Prompt], members: int | None = None) -> list[Group]:
        """Puts the prompts' groups in flight, whole or only their first ``members`` rollouts."""
        size = self.group_size if members is None else members
        groups = [Group(prompt, tuple(range(size))) for prompt in prompts]
        new = {rollout_uid(g.prompt.uid, member): g.prompt for g in groups for member in g.members}
        self._in_flight |= new
        if new and self._journal is not None:
            self._journal.admitted(new)
        return groups

    def refused(self, prompt: Header, members: int | None = None) -> list[Header]:
        """Records the rollouts of a bad prompt as admitted and at once as dead letters."""
        size = self.group_size if members is None else members
        headers = [replace(prompt, uid=rollout_uid(prompt.uid, member)) for member in range(size)]
        if self._journal is not None:
            self._journal.admitted([header.uid for header in headers])
        for header in headers:
            self._record_dead(header)
        return headers

    def requeued(self, headers: Iterable[Header]) -> list[Group]:
        """Groups of one to sample again for stale or failed samples, which stay in flight."""
        # A sample may be absent: another copy of it was trained or dead-lettered meanwhile.
        expected = [header for header in headers if self.expects(header)]
        self._requeued += len(expected)
        return [Group(self._known(header), (member_of(header.uid),)) for header in expected]

    def expects(self, header: Header) -> bool:
        """Whether the sample is in flight: neither trained nor dead-lettered."""
        return header.uid in self._in_flight

    def group_of(self, header: Header) -> list[Header]:
        """All samples in flight of the same prompt, the given one among them."""
        prompt = self._known(header)
        tokens = len(prompt.token_ids)
        uids = (rollout_uid(prompt.uid, member) for member in range(self.group_size))
        return [
            Header(uid, tokens, 0, NO_VERSION, prompt.teacher)
            for uid in uids
            if uid in self._in_flight
        ]

    def dead_lettered(self, header: Header) -> None:
        """Moves a sample from in flight to dead-lettered. StageError if it is not in flight."""
        self._known(header)
        del self._in_flight[header.uid]
        self._record_dead(header)

    def _record_dead(self, header: Header) -> None:
        self._dead.add(header.uid)
        if self._journal is not None:
            self._journal.dead(header.uid)

    def trained(self, headers: Collection[Header], step: int) -> None:
        """Moves the samples of a step from in flight to trained.

        StageError for a sample that is not in flight or comes twice: then none of the step counts,
        and no checkpoint may hold its weights.
        """
        # All are checked before the first is moved: an error leaves the accounts as they were.
        for header in headers:
            self._known(header)
        if len({header.uid for header in headers}) < len(headers):
            raise StageError("ledger", f"step {step} trained a sample twice", BUG)
        for header in headers:
            del self._in_flight[header.uid]
        self._trained += len(headers)
        if self._journal is not None:
            self._journal.trained(step, [header.uid for header in headers])

    def state(self) -> LedgerState:
        """The state now, for a checkpoint."""
        dead = tuple(sorted(self._dead))
        images = {
            prompt.uid: tuple(media.sha256 for media in prompt.media)
            for prompt in self._in_flight.values()
            if prompt.media
        }
        return LedgerState(tuple(self._in_flight), self._trained, self._requeued, dead, images)

    def restore(self, state: LedgerState, find: Callable[[Uid], Prompt]) -> None:
        """Takes over the state of a checkpoint; ``find(uid)`` looks up a prompt.

        ConfigError for prompts whose images are others than those that were in flight.
        """
        prompts = {uid: find(uid) for uid in dict.fromkeys(map(prompt_uid, state.in_flight))}
        _refuse_other_images(state, prompts)
        self._in_flight |= {uid: prompts[prompt_uid(uid)] for uid in state.in_flight}
        self._trained, self._requeued = state.trained, state.requeued
        self._dead = set(state.dead_lettered)

    def unfinished_groups(self, finished: Collection[Uid]) -> list[Group]:
        """Groups of the samples in flight without ``finished``, to sample again after a restart."""
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

    def __len__(self) -> int:
        """Samples in flight."""
        return len(self._in_flight)

    @property
    def prompts_in_flight(self) -> frozenset[Uid]:
        """Uids of the prompts that have a rollout in flight."""
        return frozenset(map(prompt_uid, self._in_flight))

    @property
    def counts(self) -> dict[str, int]:
        """Samples in each state; ``requeued`` is not a state; it counts samples that ran again."""
        return {
            "in_flight": len(self._in_flight),
            "trained": self._trained,
            "dead_lettered": len(self._dead),
            "requeued": self._requeued,
        }


def _refuse_other_images(state: LedgerState, prompts: Mapping[Uid, Prompt]) -> None:
    problems = []
    for uid, prompt in prompts.items():
        was, now = state.images.get(uid, ()), tuple(media.sha256 for media in prompt.media)
        if was != now:
            message = (
                f"prompt {uid} was sampled with images {list(was)}, its row now has {list(now)}"
            )
            remedy = "restore the images: rollouts of this prompt are in flight"
            problems.append(Problem("--resume", "data.train", message, remedy))
    if problems:
        raise ConfigError(problems)


BUG = "this is a bug of async_opd; please report it with the run's log"
