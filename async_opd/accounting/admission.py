"""Admission: the only place where staleness is controlled.

With B samples a batch, K steps a weight version, v the version the rollout engines have and
s the staleness threshold, the number of samples ever admitted obeys

    admitted ≤ (v + 1 + s) · K · B        and        admitted ≤ steps · B

s = 0 and K = 1 is exactly on-policy: no prompt of batch v + 1 starts before version v + 1 is there.
A sample that is lost gives its place back, so that the run's last batch is always filled.
"""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction

from async_opd.config.run_config import RunConfig


def max_samples_in_flight(config: RunConfig) -> int:
    """Samples that may be admitted and not trained at one time: ⌊(1 + s) · K · B⌋.

    By the budget, since v · K · B of them are trained when the engines have version v.
    """
    share = 1 + Fraction(str(config.async_.staleness_threshold))
    return math.floor(share * config.async_.sync_steps * config.train.batch_size)


class Admission:
    """Counts samples against the budget and wakes who waits for it. One event loop, no locks."""

    def __init__(
        self, *, batch_size: int, sync_steps: int, staleness_threshold: float, steps: int
    ) -> None:
        self._per_version = batch_size * sync_steps
        self._threshold = Fraction(str(staleness_threshold))  # 0.7 means 7/10: floor() is exact
        self._total = batch_size * steps
        self._version = 0
        self._admitted = 0
        self._budget = self._allowed()
        self._changed = asyncio.Event()

    @property
    def admitted(self) -> int:
        """Samples admitted and not lost."""
        return self._admitted

    @property
    def version(self) -> int:
        """The weight version of the rollout engines."""
        return self._version

    @property
    def budget(self) -> int:
        """Samples that may have been admitted by now."""
        return self._budget

    @property
    def exhausted(self) -> bool:
        """Every sample the run needs is admitted (one may still be lost and reopen it)."""
        return self._admitted >= self._total

    async def admit(self, samples: int, at_most_groups: int = 1) -> int:
        """Waits until ``samples`` more fit the budget; admits up to so many groups of that size.

        Returns the number of groups admitted, at least 1.
        """
        while (groups := self.try_admit(samples, at_most_groups)) < 1:
            self._changed.clear()
            await self._changed.wait()
        return groups

    def try_admit(self, samples: int, at_most_groups: int = 1) -> int:
        """Like ``admit`` without waiting: 0 if not one group fits the budget.

        A run that is resumed with a smaller threshold may have admitted more than its budget:
        then nothing is admitted until the budget has caught up.
        """
        room = max(0, self.budget - self._admitted)
        groups = min(room // samples, at_most_groups)
        self._admitted += groups * samples
        return groups

    def advance(self, version: int) -> None:
        """The rollout engines generate with ``version`` now."""
        if version < self._version:
            raise ValueError(f"weight version went back from {self._version} to {version}")
        self._version = version
        self._budget = self._allowed()
        self._changed.set()

    def restore(self, version: int, admitted: int) -> None:
        """Goes on from a checkpoint."""
        self._admitted = admitted
        self.advance(version)

    def readmit(self, samples: int) -> None:
        """Samples take places that ``give_back`` left open in a group: no group fits there."""
        self._admitted += samples

    def give_back(self, samples: int) -> None:
        """Admitted samples were lost: others may take their place."""
        self._admitted -= samples
        self._changed.set()

    def _allowed(self) -> int:
        allowed = math.floor((self._version + 1 + self._threshold) * self._per_version)
        return min(allowed, self._total)
