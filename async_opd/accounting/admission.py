"""Admission: the only place where staleness is controlled.

With B samples a batch, K steps a weight version, v the weight version of the rollout engines and
s the staleness threshold, the number of samples ever admitted obeys

    admitted ≤ (v + 1 + s) · K · B        and        admitted ≤ steps · B

s = 0 and K = 1 is exactly on-policy: no prompt of batch v + 1 starts before the engines have
version v + 1. A dead letter returns its slot to the budget, so that the last batch is filled too.
"""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction


class Admission:
    """Counts samples against the budget and wakes waiting callers. One event loop, no locks."""

    def __init__(
        self, *, batch_size: int, sync_steps: int, staleness_threshold: float, steps: int
    ) -> None:
        self._per_version = batch_size * sync_steps
        self._threshold = Fraction(str(staleness_threshold))  # 0.7 means 7/10: floor() is exact
        self._total = batch_size * steps
        self._version = 0
        self._admitted = 0
        self._changed = asyncio.Event()

    @property
    def admitted(self) -> int:
        """Samples admitted, without those that gave their slot back."""
        return self._admitted

    @property
    def version(self) -> int:
        """The weight version of the rollout engines."""
        return self._version

    @property
    def budget(self) -> int:
        """The most samples that may have been admitted by now."""
        allowed = math.floor((self._version + 1 + self._threshold) * self._per_version)
        return min(allowed, self._total)

    async def room(self, samples: int, at_most_groups: int = 1) -> int:
        """Waits until a group of so many ``samples`` fits the budget, and admits none.

        Returns the number of groups that fit, from 1 to ``at_most_groups``.
        """
        while (groups := self._room(samples, at_most_groups)) < 1:
            self._changed.clear()
            await self._changed.wait()
        return groups

    def try_admit(self, samples: int, at_most_groups: int = 1) -> int:
        """Admits the groups of that size that fit the budget now; returns their number."""
        groups = self._room(samples, at_most_groups)
        self._admitted += groups * samples
        return groups

    def _room(self, samples: int, at_most_groups: int) -> int:
        # A run resumed with a smaller threshold may have admitted more than its budget: the room
        # is 0 then, not negative, until the budget has caught up.
        return min(max(0, self.budget - self._admitted) // samples, at_most_groups)

    def advance(self, version: int) -> None:
        """Sets the weight version of the rollout engines. ValueError if it is an older one."""
        if version < self._version:
            raise ValueError(f"weight version went back from {self._version} to {version}")
        self._version = version
        self._changed.set()

    def restore(self, version: int, admitted: int) -> None:
        """Sets the weight version and the admitted samples of a checkpoint."""
        self._admitted = admitted
        self.advance(version)

    def readmit(self, samples: int) -> None:
        """Counts samples in slots of a broken group, where ``admit`` finds room for none."""
        self._admitted += samples

    def give_back(self, samples: int) -> None:
        """Returns the slots of admitted samples that will never be trained."""
        self._admitted -= samples
        self._changed.set()
