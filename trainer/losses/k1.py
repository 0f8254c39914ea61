"""Reverse KL(q ‖ p) by the sampled-token estimator k1, as a policy gradient.

k1 = log q(y) - log p(y) with y ~ q is an unbiased estimate of KL(q ‖ p) (Schulman, "Approximating
KL Divergence"). Its gradient with respect to the student is that of

    loss_t = - A_t log q(y_t),    A_t = -(log q(y_t) - log p(y_t)), held constant

(differentiating k1 itself would give E[∇ log q] = 0: the teacher does not appear). A_t > 0 where
the teacher likes the token more than the student does. The signal is always computed under the
student's current weights, never under those that sampled.
"""

from __future__ import annotations

import torch

from trainer.losses.estimators import SampledSlopes, policy_gradient


class K1:
    """-A_t log q(y_t) of each token."""

    def __init__(self, clamp: float | None) -> None:
        self._clamp = clamp

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> SampledSlopes:
        return policy_gradient(log_p - log_q, log_q, self._clamp)
