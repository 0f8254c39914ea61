"""From losses of tokens to one number: what each token weighs.

    token_mean               1 / T                 T: response tokens of the batch
    seq_mean_token_mean      1 / (B · R_s)         B: samples with a response, R_s: its tokens
    seq_mean_token_sum       1 / B
    seq_mean_token_sum_norm  1 / (B · max_tokens)

All denominators are those of the whole batch, so that neither micro-batches nor ranks change the
result. Empty responses have no tokens and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_opd.core.loss_config import Reduction


def token_weights(lengths: Sequence[int], reduction: Reduction, max_tokens: int) -> list[float]:
    """The weight of each token of each sample; ``lengths`` are the batch's response lengths."""
    samples = max(sum(length > 0 for length in lengths), 1)
    if reduction == "token_mean":
        return [1 / max(sum(lengths), 1)] * len(lengths)
    if reduction == "seq_mean_token_mean":
        return [1 / (samples * max(length, 1)) for length in lengths]
    norm = max_tokens if reduction == "seq_mean_token_sum_norm" else 1
    return [1 / (samples * norm)] * len(lengths)
