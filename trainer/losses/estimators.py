"""Sampled-token estimators k2, k3 and abs (Schulman, "Approximating KL Divergence").

With y ~ q and d = log q(y) - log p(y):

    k2 = d² / 2          supervised gradient d ∇log q:           in expectation that of KL(q ‖ p)
    k3 = exp(-d) - 1 + d supervised gradient (1 - p/q) ∇log q:   in expectation that of KL(p ‖ q)
    abs = |d|            supervised gradient sign(d) ∇log q:     in expectation that of Σ |q - p|

``policy_gradient`` holds the estimate constant and uses its negative as the advantage of the
sampled token: the loss is -A log q(y) with A = -k(d). That is not the gradient of the estimate's
expectation, but the usual meaning of the name. k1 is in ``k1.py``: its supervised gradient does not
depend on the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Estimator = Literal["k2", "k3", "abs"]


@dataclass(frozen=True)
class SampledSlopes:
    """A value per token [n], its derivative by log q(y) [n], and which advantages were clamped."""

    value: torch.Tensor
    slope: torch.Tensor
    clamped: torch.Tensor | None = None


class SampledLoss(Protocol):
    """A loss of log p(y) and log q(y), each [n]."""

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> SampledSlopes: ...


@dataclass(frozen=True)
class SampledEstimator:
    """The estimate of each token, or its policy gradient with the advantage clamped."""

    kind: Estimator
    gradient: Literal["supervised", "policy_gradient"]
    clamp: float | None

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> SampledSlopes:
        value, slope = self._estimate(log_q - log_p)
        if self.gradient == "supervised":
            return SampledSlopes(value, slope)
        return policy_gradient(-value, log_q, self.clamp)

    def _estimate(self, gap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "k2":
            return gap.square() / 2, gap
        if self.kind == "k3":
            return torch.expm1(-gap) + gap, -torch.expm1(-gap)
        return gap.abs(), gap.sign()


def policy_gradient(
    advantage: torch.Tensor, log_q: torch.Tensor, clamp: float | None
) -> SampledSlopes:
    """-A log q(y), with the advantage bounded to [-clamp, clamp]."""
    if clamp is None:
        return SampledSlopes(-advantage * log_q, -advantage)
    bounded = advantage.clamp(-clamp, clamp)
    return SampledSlopes(-bounded * log_q, -bounded, advantage.abs() > clamp)


@dataclass(frozen=True)
class CrossEntropy:
    """-log q(y_t) of given tokens, which the student did not sample; slope -1 by log q(y_t).

    For the supervised steps of a cold start: forward KL(p ‖ q) of a p with all its mass on y_t.
    """

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> SampledSlopes:
        return SampledSlopes(-log_q, torch.full_like(log_q, -1.0))
