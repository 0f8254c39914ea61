"""How far the engines' probabilities are from the trainer's under the same weights.

    response sampled under version v, while the trainer's weights are those of v: fresh
        d_t = log q(y_t) - log mu(y_t) of its tokens ──► Gaps of each rank ──► mismatch/…

mu is the distribution that the engine sampled, q the trainer's, both at the rollouts' temperature.
Weights are equal, so that d is rounding: 0 if both compute alike. All other tokens are left out, as
their d is staleness too. Over the N fresh tokens of a step, and the S responses that they make up:

    mismatch/kl      Σ_t (exp(d_t) - 1 - d_t) / N: an estimate of KL(mu ‖ q) in nats, without bias
                     (y ~ mu, and E[exp(d)] = 1), whose summands are never negative
    mismatch/p99     the 99th percentile of |d_t| in nats, by linear interpolation
    mismatch/error   Σ_t exp(|d_t|) / N: the mean factor between the probabilities, at least 1
    mismatch/ess     (Σ_s w_s)² / (S Σ_s w_s²) with w_s = exp(Σ_t d_t) over each response: the
                     share of responses that weights of whole responses would leave effective

Sums are float64. A step without fresh tokens has none of these metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.losses.base import Tokens
from trainer.losses.objective import LOG_RATIO, MAX_LOG_RATIO
from trainer.losses.terms import Metrics

QUANTILE = 0.99


@dataclass(frozen=True)
class Gaps:
    """d of one rank's fresh tokens, float32 [n] in nats; ``responses`` int64 [n] number theirs."""

    values: NDArray[np.float32]
    responses: NDArray[np.int64]


@dataclass(frozen=True)
class FreshTokens:
    """Of the tokens of one micro-batch log q - log mu, float32 [N] on any device.

    ``fresh`` and ``responses`` [N], in host memory: which of them count, and of which response each
    is, as ranks that share its row number it.
    """

    log_ratios: torch.Tensor
    fresh: torch.Tensor
    responses: torch.Tensor

    @classmethod
    def of(cls, number: int, tokens: Tokens, values: Metrics) -> FreshTokens | None:
        """Of the micro-batch ``number`` of a rank; None if none of its tokens is fresh."""
        if tokens.fresh is None or tokens.response_starts is None or not tokens.fresh.any():
            return None
        return cls(values[LOG_RATIO], tokens.fresh, tokens.response_starts + (number << 32))


def gaps_of(parts: Sequence[FreshTokens]) -> Gaps | None:
    """The gaps of a rank's micro-batches, with one transfer from the device; None of no parts."""
    if not parts:
        return None
    fresh = torch.cat([one.fresh for one in parts])
    found = torch.cat([one.log_ratios for one in parts]).float().cpu()[fresh]
    return Gaps(found.numpy(), torch.cat([one.responses for one in parts])[fresh].numpy())


def mismatch(ranks: Sequence[Gaps | None], sharing: int = 1) -> dict[str, float]:
    """The metrics of a step from the gaps of all ranks, of which ``sharing`` share each row."""
    groups = [ranks[i : i + sharing] for i in range(0, len(ranks), sharing)]
    found = [[one for one in group if one is not None] for group in groups]
    gaps = [one.values for group in found for one in group]
    if not gaps:
        return {}
    d = np.concatenate(gaps).astype(np.float64)
    size, bounded = np.abs(d), np.minimum(d, MAX_LOG_RATIO)
    sums = np.concatenate([_of_responses(group) for group in found if group])
    weights = np.exp(sums - sums.max())
    return {
        "mismatch/kl": float(np.mean(np.expm1(bounded) - d)),
        "mismatch/p99": float(np.quantile(size, QUANTILE)),
        "mismatch/error": float(np.mean(np.exp(np.minimum(size, MAX_LOG_RATIO)))),
        "mismatch/ess": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
    }


def _of_responses(group: Sequence[Gaps]) -> NDArray[np.float64]:
    """Σ d of each response; ranks that share rows have parts of the same ones."""
    numbers = np.concatenate([one.responses for one in group])
    index = np.unique(numbers, return_inverse=True)[1]
    gaps = np.concatenate([one.values for one in group])
    return np.asarray(np.bincount(index, weights=gaps), dtype=np.float64)
