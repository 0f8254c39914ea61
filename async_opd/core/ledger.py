"""What became of every admitted sample: in flight, then trained, exactly once."""

from __future__ import annotations

from collections.abc import Iterable

from async_opd.core.errors import StageError
from async_opd.core.samples import Header, Prompt


class Ledger:
    """Accounts for rollouts by uid. A sample that is unknown or comes twice stops the run."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._in_flight: set[str] = set()
        self._trained = 0

    def admitted(self, prompts: Iterable[Prompt]) -> None:
        """The prompts' groups are in flight."""
        for prompt in prompts:
            self._in_flight |= {f"{prompt.uid}/{index}" for index in range(self._group_size)}

    def trained(self, headers: Iterable[Header]) -> None:
        """The samples are trained. StageError for one that is not in flight."""
        for header in headers:
            if header.uid not in self._in_flight:
                raise StageError(
                    "ledger",
                    f"sample {header.uid} was trained but is not in flight: it came twice or was "
                    "never admitted",
                    "this is a bug of async_opd; please report it with the run's log",
                )
            self._in_flight.remove(header.uid)
            self._trained += 1

    @property
    def counts(self) -> dict[str, int]:
        """Samples in each state."""
        return {"in_flight": len(self._in_flight), "trained": self._trained}
