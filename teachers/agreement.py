"""How far a teacher agrees with the student's rollouts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from async_opd.core.samples import Sample, SampledLogprobs


class Agreement:
    """Sums log p(teacher) - log q(rollout) over sampled tokens, in nats, and counts the tokens.

    Scores without the sampled tokens' log-probabilities (hidden states) are left out: the trainer,
    which has the teacher's head, reports theirs (``trainer/losses/report.py``).
    """

    def __init__(self) -> None:
        self._gap = 0.0
        self._tokens = 0

    def add(self, samples: Iterable[Sample]) -> None:
        """These were scored."""
        for sample in samples:
            scores = sample.scores
            name = "logprobs" if isinstance(scores, SampledLogprobs) else "sampled_logprobs"
            teacher = getattr(scores, name, None)
            if teacher is not None:
                gaps = teacher - sample.rollout.rollout_logprobs
                self._gap += float(np.sum(gaps, dtype=np.float64))
                self._tokens += len(gaps)

    def drain(self) -> dict[str, float]:
        """Counters ``gap`` and ``gap_tokens`` since the last call."""
        counters = {"gap": self._gap, "gap_tokens": float(self._tokens)}
        self._gap, self._tokens = 0.0, 0
        return counters
