"""Metrics of a step that depend on its samples alone, not on the student."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_opd.core.samples import Sample
from trainer.batches.repetition import repetition


def batch_metrics(samples: Sequence[Sample], budget: int) -> dict[str, float]:
    """Tokens of the batch; shares of truncated and empty samples; repetition.

    ``train/over_budget`` is the number of samples with more tokens than ``budget``.
    """
    rollouts = [sample.rollout for sample in samples]
    count = max(len(rollouts), 1)
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    return {
        "train/tokens": float(sum(rollout.tokens for rollout in rollouts)),
        "train/response_tokens": float(sum(lengths)),
        "train/mean_response_tokens": sum(lengths) / count,
        "train/std_response_tokens": float(np.std(lengths)) if lengths else 0.0,
        "train/truncated_share": sum(r.finish_reason == "length" for r in rollouts) / count,
        "train/empty_responses": float(lengths.count(0)),
        "train/over_budget": float(sum(rollout.tokens > budget for rollout in rollouts)),
        "train/repetition": sum(map(repetition, rollouts)) / count,
    }
