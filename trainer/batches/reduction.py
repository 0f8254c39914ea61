"""The weight of each token in the sum that makes one loss of the tokens' losses.

For samples s of weight a_s (their teacher's), R_s response tokens each:

    token_mean               a_s / T                   T = Σ a_s R_s
    seq_mean_token_mean      a_s / (B · R_s)           B = Σ a_s over samples with a response
    seq_mean_token_sum       a_s / B
    seq_mean_token_sum_norm  a_s / (B · max_tokens)

Weights a_s that are all equal change nothing. All denominators are those of the whole batch, so
that neither micro-batches nor ranks change the result. Empty responses have no tokens and count in
no denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_opd.config.sections.loss import Reduction


def token_weights(
    lengths: Sequence[int],
    reduction: Reduction,
    max_tokens: int,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """The weight of each token of each sample; ``lengths`` are the batch's response lengths.

    ``weights`` are a_s, positive; by default all 1.
    """
    weights = weights or [1.0] * len(lengths)
    pairs = list(zip(weights, lengths, strict=True))
    if reduction == "token_mean":
        tokens = sum(weight * length for weight, length in pairs) or 1.0
        return [weight / tokens for weight in weights]
    samples = sum(weight for weight, length in pairs if length) or 1.0
    if reduction == "seq_mean_token_mean":
        return [weight / (samples * max(length, 1)) for weight, length in pairs]
    norm = max_tokens if reduction == "seq_mean_token_sum_norm" else 1
    return [weight / (samples * norm) for weight in weights]
