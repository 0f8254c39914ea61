"""What became of every admitted sample: in flight, then trained or dead-lettered, exactly once."""

from __future__ import annotations

from collections.abc import Iterable

from async_opd.core.errors import StageError
from async_opd.core.samples import NEVER_OLD, Group, Header, Prompt


class Ledger:
    """Accounts for rollouts by uid. A sample that is unknown or comes twice stops the run."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._in_flight: dict[str, Prompt] = {}
        self._trained = 0
        self._requeued = 0
        self._buried: set[str] = set()

    def admitted(self, prompts: Iterable[Prompt], members: int | None = None) -> list[Group]:
        """The prompts' groups are in flight: whole ones, or their first ``members``."""
        size = self._group_size if members is None else members
        groups = [Group(prompt, tuple(range(size))) for prompt in prompts]
        for group in groups:
            for member in group.members:
                self._in_flight[f"{group.prompt.uid}/{member}"] = group.prompt
        return groups

    def requeued(self, headers: Iterable[Header]) -> list[Group]:
        """The samples came too late: what to run again. They stay in flight, and admitted."""
        groups = []
        for header in headers:
            if not self.expects(header):
                continue  # another copy of it was trained or buried meanwhile
            prompt = self._known(header)
            member = int(header.uid.removeprefix(f"{prompt.uid}/"))
            groups.append(Group(prompt, (member,)))
        self._requeued += len(groups)
        return groups

    def expects(self, header: Header) -> bool:
        """Whether the sample is in flight; if not, it came before."""
        return header.uid in self._in_flight

    def group_of(self, header: Header) -> list[Header]:
        """All samples in flight of the same prompt, the given one among them."""
        prompt = self._known(header)
        tokens = len(prompt.token_ids)
        mine = (f"{prompt.uid}/{member}" for member in range(self._group_size))
        return [
            Header(uid, tokens, 0, NEVER_OLD, prompt.teacher)
            for uid in mine
            if uid in self._in_flight
        ]

    def dead_lettered(self, header: Header) -> None:
        """The sample will never be trained."""
        self._known(header)
        del self._in_flight[header.uid]
        self._buried.add(header.uid)

    def trained(self, headers: Iterable[Header]) -> None:
        """The samples are trained. StageError for one that is not in flight."""
        for header in headers:
            if header.uid in self._buried:
                continue  # another copy of it could not be scored, and was replaced
            self._known(header)
            del self._in_flight[header.uid]
            self._trained += 1

    def _known(self, header: Header) -> Prompt:
        prompt = self._in_flight.get(header.uid)
        if prompt is None:
            raise StageError(
                "ledger",
                f"sample {header.uid} came out of the pipeline but is not in flight: it came "
                "twice or was never admitted",
                "this is a bug of async_opd; please report it with the run's log",
            )
        return prompt

    @property
    def counts(self) -> dict[str, int]:
        """Samples in each state; ``requeued`` counts how often one went back, and is no state."""
        return {
            "in_flight": len(self._in_flight),
            "trained": self._trained,
            "dead_lettered": len(self._buried),
            "requeued": self._requeued,
        }
