"""The lengths of responses, in tokens, which the planner and the simulated engines share."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Response lengths: log-normal with this mean and this sigma of the logarithm, cut at ``most``.

    ``sigma`` 0 gives ``mean`` always. ``mean`` is that of the distribution before it is cut.
    """

    mean: float
    sigma: float
    most: int

    def sample(self, random_: random.Random) -> int:
        """One length from 1 to ``most``."""
        location = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.most, round(random_.lognormvariate(location, self.sigma))))
