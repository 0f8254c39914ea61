"""The task reward's loss: PPO's clipped surrogate (arXiv:1707.06347, eq. 7), one advantage a token.

    loss_t = -min(r A, clip(r, 1 - low, 1 + high) A),     r = q(y_t) / mu(y_t)

mu is the distribution that was sampled, so that r corrects for stale rollouts too. Where the clip
is the smaller one, the token has no gradient; the share of such tokens is a metric.
"""

from __future__ import annotations

import torch

from trainer.losses.estimators import SampledSlopes


class ClippedSurrogate:
    """The surrogate of each token, by its log-ratio [n] and advantage [n]."""

    def __init__(self, low: float, high: float) -> None:
        self._low = low
        self._high = high

    def __call__(self, log_ratio: torch.Tensor, advantage: torch.Tensor) -> SampledSlopes:
        """``slope`` is by log q(y); ``clamped`` marks tokens without gradient."""
        free = log_ratio.exp() * advantage
        bound = log_ratio.exp().clamp(1 - self._low, 1 + self._high) * advantage
        clipped = bound < free
        return SampledSlopes(-torch.minimum(free, bound), -free.masked_fill(clipped, 0.0), clipped)
