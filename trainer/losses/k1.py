"""Reverse KL(q ‖ p) by the sampled-token estimator k1, as a policy gradient.

k1 = log q(y) - log p(y) with y ~ q is an unbiased estimate of KL(q ‖ p) (Schulman, "Approximating
KL Divergence"). Its gradient with respect to the student is that of

    loss_t = - A_t log q(y_t),    A_t = -(log q(y_t) - log p(y_t)), held constant

(differentiating k1 itself would give E[∇ log q] = 0: the teacher does not appear). A_t > 0 where
the teacher likes the token more than the student does. The signal is always computed under the
student's current weights, never under those that sampled.
"""

from __future__ import annotations

from trainer.losses.base import LossInputs, LossSums


class K1:
    """Sum over tokens of -A_t log q(y_t)."""

    def __init__(self, clamp: float | None) -> None:
        self._clamp = clamp

    def __call__(self, inputs: LossInputs) -> LossSums:
        """Metric ``clamped``: tokens whose advantage the clamp touches."""
        log_q = inputs.sampled
        advantage = (inputs.teacher_logprobs - log_q).detach()
        metrics = {}
        if self._clamp is not None:
            metrics["clamped"] = (advantage.abs() > self._clamp).sum()
            advantage = advantage.clamp(-self._clamp, self._clamp)
        return LossSums(-(advantage * log_q).sum(), metrics)
