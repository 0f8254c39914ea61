"""The prediction of a run: rates, shares of time, staleness and queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolUse:
    """How a pool spends its time.

    ``busy`` is the share of time in which a replica has work, the mean over replicas, as a run's
    metric ``busy_s`` measures it. ``used`` is the pool's throughput as a share of its ``limit``,
    which is its own limit in samples per second. ``waits`` are the shares of the remaining time by
    what the pool waits for, the largest first.
    """

    name: str
    replicas: int
    busy: float
    used: float
    limit: float
    waits: Mapping[str, float]

    @property
    def waits_for(self) -> str:
        """The pool's longest wait; '' if that is less than 1 % of the time."""
        reason = next(iter(self.waits), "")
        return reason if reason and self.waits[reason] >= 0.01 else ""


@dataclass(frozen=True)
class Prediction:
    """Rates and shares after the warm-up; ``seconds`` is the time of the whole training.

    ``wall_s`` includes the time before the first and after the last step. ``staleness[v]`` is the
    share of samples with staleness v, ``queues[topic]`` the topic's mean number of ready samples.
    """

    samples_per_s: float
    seconds: float
    wall_s: float
    staleness: Mapping[int, float]
    pools: tuple[PoolUse, ...]
    queues: Mapping[str, float]
    concurrency: float
    """Mean number of requests on a replica while it generates."""
    sample_tokens: float
    """Mean prompt and response tokens of a trained sample."""
    batches: Mapping[str, float]
    """Mean rollouts of a batch, by teacher."""

    @property
    def bottleneck(self) -> PoolUse:
        """The pool with the smallest limit."""
        return min(self.pools, key=lambda pool: pool.limit)

    @property
    def mean_staleness(self) -> float:
        """The mean over the samples, in weight versions."""
        return sum(value * share for value, share in self.staleness.items())
