"""Sampled-token estimators k2, k3 and abs (Schulman, "Approximating KL Divergence").

With y ~ q and d = log q(y) - log p(y):

    k2 = d² / 2          supervised gradient d ∇log q:           in expectation that of KL(q ‖ p)
    k3 = exp(-d) - 1 + d supervised gradient (1 - p/q) ∇log q:   in expectation that of KL(p ‖ q)
    abs = |d|            supervised gradient sign(d) ∇log q:     in expectation that of Σ |q - p|

``policy_gradient`` holds the estimate constant and uses its negative as the advantage of the
sampled token: -A log q(y) with A = -k(d). It is not the gradient of the estimate's expectation, but
what others call by this name. k1 has a file of its own: supervised, it teaches nothing.
"""

from __future__ import annotations

from typing import Literal

import torch

from trainer.losses.base import LossInputs, LossSums

Estimator = Literal["k2", "k3", "abs"]


class SampledEstimator:
    """Sum over tokens of the estimate, or of its policy gradient."""

    def __init__(
        self,
        kind: Estimator,
        gradient: Literal["supervised", "policy_gradient"],
        clamp: float | None,
    ) -> None:
        self._kind = kind
        self._gradient = gradient
        self._clamp = clamp

    def __call__(self, inputs: LossInputs) -> LossSums:
        """Metric ``clamped``: tokens whose policy-gradient advantage the clamp touches."""
        log_q = inputs.sampled
        value = self._estimate(log_q - inputs.teacher_logprobs)
        if self._gradient == "supervised":
            return LossSums(value.sum())
        advantage = -value.detach()
        metrics = {}
        if self._clamp is not None:
            metrics["clamped"] = (advantage.abs() > self._clamp).sum()
            advantage = advantage.clamp(-self._clamp, self._clamp)
        return LossSums(-(advantage * log_q).sum(), metrics)

    def _estimate(self, gap: torch.Tensor) -> torch.Tensor:
        if self._kind == "k2":
            return gap.square() / 2
        if self._kind == "k3":
            return torch.expm1(-gap) + gap
        return gap.abs()
