"""What a run will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolUse:
    """How a pool spends its time.

    ``busy`` is the share of time in which a replica has work, the mean over replicas: what the
    metric ``busy_s`` of a run measures. ``used`` is the share of what the pool could do that it
    does. ``waits`` says where the rest goes: shares by what was waited for, the largest first.
    ``limit`` is the pool's own limit in samples per second.
    """

    name: str
    replicas: int
    busy: float
    used: float
    limit: float
    waits: Mapping[str, float]

    @property
    def waits_for(self) -> str:
        """What it waited for most; '' if it did not wait for anything to speak of."""
        reason = next(iter(self.waits), "")
        return reason if reason and self.waits[reason] >= 0.01 else ""


@dataclass(frozen=True)
class Prediction:
    """Rates and shares are those after the warm-up; ``seconds`` is all of the training.

    ``staleness[v]`` is the share of samples with staleness v, ``queues[topic]`` the mean number of
    samples that are ready there.
    """

    samples_per_s: float
    seconds: float
    wall_s: float
    staleness: Mapping[int, float]
    pools: tuple[PoolUse, ...]
    queues: Mapping[str, float]
    concurrency: float
    """Requests that run on a replica while it generates."""
    sample_tokens: float
    """Mean prompt and response tokens of a trained sample."""
    batches: Mapping[str, float]
    """Mean rollouts of a batch, by teacher."""

    @property
    def bottleneck(self) -> PoolUse:
        """The pool with the smallest limit of its own."""
        return min(self.pools, key=lambda pool: pool.limit)

    @property
    def mean_staleness(self) -> float:
        """Mean over the samples."""
        return sum(value * share for value, share in self.staleness.items())

    @property
    def max_staleness(self) -> int:
        """The staleest sample's."""
        return max(self.staleness, default=0)
