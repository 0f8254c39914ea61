"""The speeds of a pipeline's parts, which the planner and the simulated engines share.

Times are seconds, lengths tokens.
"""

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


@dataclass(frozen=True)
class DecodeSpeed:
    """A rollout replica: one step gives each running request one token.

    With n requests it takes ``step_s + n * step_s_per_request``; at most ``slots`` requests run.
    """

    slots: int
    step_s: float
    step_s_per_request: float

    def step(self, running: int) -> float:
        """Seconds of one decoding step."""
        return self.step_s + running * self.step_s_per_request

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second with every slot full."""
        return self.slots / self.step(self.slots)


@dataclass(frozen=True)
class ScoreSpeed:
    """A teacher replica: one batch of at most ``batch`` rollouts at a time.

    It takes ``overhead_s``, plus its prompt and response tokens at ``tokens_per_s``.
    """

    batch: int
    overhead_s: float
    tokens_per_s: float

    def seconds(self, tokens: int) -> float:
        """Seconds of one batch with so many tokens."""
        return self.overhead_s + tokens / self.tokens_per_s


@dataclass(frozen=True)
class TrainSpeed:
    """The trainer: a step takes ``overhead_s`` plus its tokens at ``tokens_per_s``.

    Tokens are prompt and response. A snapshot takes ``snapshot_s`` of the trainer's time, and a
    sync holds each rollout replica for ``sync_s``.
    """

    overhead_s: float
    tokens_per_s: float
    snapshot_s: float
    sync_s: float

    def seconds(self, tokens: int) -> float:
        """Seconds of one step with so many tokens."""
        return self.overhead_s + tokens / self.tokens_per_s
