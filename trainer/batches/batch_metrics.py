"""Metrics of a step that depend on its headers alone, not on the student."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from async_opd.core.samples import Header


def batch_metrics(headers: Sequence[Header], budget: int) -> dict[str, float]:
    """Tokens of the batch; shares of truncated and empty samples; values by data source.

    ``train/over_budget`` is the number of samples with more tokens than ``budget``.
    """
    count = max(len(headers), 1)
    lengths = [header.response_tokens for header in headers]
    return {
        "train/tokens": float(sum(header.tokens for header in headers)),
        "train/response_tokens": float(sum(lengths)),
        "train/mean_response_tokens": sum(lengths) / count,
        "train/std_response_tokens": float(np.std(lengths)) if lengths else 0.0,
        "train/truncated_share": sum(h.finish_reason == "length" for h in headers) / count,
        "train/empty_responses": float(lengths.count(0)),
        "train/over_budget": float(sum(header.tokens > budget for header in headers)),
        **_of_sources(headers),
    }


def _of_sources(headers: Sequence[Header]) -> dict[str, float]:
    """Means over the batch's samples of each data source; ``accuracy``: of the graders' scores."""
    by_source: defaultdict[str, list[Header]] = defaultdict(list)
    for header in headers:
        by_source[header.data_source].append(header)
    metrics: dict[str, float] = {}
    for source, own in by_source.items():
        prefix = f"source/{source}"
        metrics[f"{prefix}/mean_response_tokens"] = fmean(one.response_tokens for one in own)
        metrics[f"{prefix}/truncated_share"] = fmean(one.finish_reason == "length" for one in own)
        rewards = [one.reward for one in own if one.reward is not None]
        if rewards:
            metrics[f"{prefix}/accuracy"] = fmean(rewards)
    return metrics
