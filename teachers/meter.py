"""The scoring report of a teacher's replica: counters, busy intervals, agreement."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np

from async_opd.core.batch import Batch, unpack
from async_opd.core.reports import StageReport
from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import SampledLogprobs
from async_opd.observability.activity import Activity
from async_opd.waiting.deadline import gather_or_cancel

IDLE = "rollouts"
"""The wait of a replica that scores nothing; its pool and the stage may know another reason."""
COUNTERS = ("tokens", "samples", "batches", "gap", "gap_tokens")


class ScoringMeter:
    """Counts what was scored since the last report.

    ``gap`` is the sum of log p(teacher) - log q(rollout) over ``gap_tokens`` sampled tokens, in
    nats. It leaves out scores without the sampled tokens' log-probabilities (hidden states): the
    trainer, which has the teacher's head, reports theirs (``trainer/losses/report.py``).
    """

    def __init__(self, replica: str = "") -> None:
        self.activity = Activity("score", track=replica, causes=(IDLE,), cause=lambda: IDLE)
        self._counters = dict.fromkeys(COUNTERS, 0.0)

    async def score(
        self, batch: Batch, score: Callable[[Rollout], Coroutine[Any, Any, Sample]]
    ) -> Batch:
        """The samples of a batch of rollouts, in order; see ``gather_or_cancel``."""
        rollouts = unpack(Rollout, [batch])
        with self.activity.busy() as since:
            samples = await gather_or_cancel(*map(score, rollouts))
            for rollout in rollouts:
                self.activity.sampled(rollout.uid, since)
        self._counters["batches"] += 1
        self.add(samples)
        return Batch.pack(samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Counts these samples."""
        counters = self._counters
        for sample in samples:
            counters["samples"] += 1
            counters["tokens"] += sample.rollout.tokens
            scores = sample.scores
            name = "logprobs" if isinstance(scores, SampledLogprobs) else "sampled_logprobs"
            teacher = getattr(scores, name, None)
            if teacher is not None:
                gaps = teacher - sample.rollout.rollout_logprobs
                counters["gap"] += float(np.sum(gaps, dtype=np.float64))
                counters["gap_tokens"] += len(gaps)

    def report(self) -> StageReport:
        """The report since the last one."""
        counters, self._counters = self._counters, dict.fromkeys(COUNTERS, 0.0)
        return StageReport(
            counters=counters | self.activity.drain_waits(),
            gauges={"in_flight": float(self.activity.depth)},
            busy=self.activity.drain(),
            waits_for="" if self.activity.depth else IDLE,
            spans=self.activity.drain_spans(),
        )
