"""Reverse KL(q ‖ p) by the sampled-token estimator k1, as a policy gradient.

k1 = log q(y) - log p(y) with y ~ q is an unbiased estimate of KL(q ‖ p) (Schulman, "Approximating
KL Divergence"). Its gradient with respect to the student is that of

    loss_t = - A_t log q(y_t),    A_t = -(log q(y_t) - log p(y_t)), held constant

(the gradient of k1 itself is E[∇ log q] = 0, without the teacher). A_t > 0 where the teacher gives
the token a higher probability than the student. q is always the student under its current weights,
never under those that sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.estimators import SampledSlopes, policy_gradient


@dataclass(frozen=True)
class K1:
    """-A_t log q(y_t) of each token; ``clamp`` bounds A_t to [-clamp, clamp]."""

    clamp: float | None

    def __call__(
        self, log_p: torch.Tensor, log_q: torch.Tensor, log_rest: torch.Tensor
    ) -> SampledSlopes:
        return policy_gradient(log_p - log_q, log_q, self.clamp)
