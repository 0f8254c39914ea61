"""Metrics of a step that depend on its headers alone, not on the student."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_opd.core.samples import Header


def batch_metrics(headers: Sequence[Header], budget: int) -> dict[str, float]:
    """Tokens of the batch; shares of truncated and empty samples.

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
    }
