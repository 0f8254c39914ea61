"""Reverse KL(q ‖ p): mode seeking (MiniLLM, arXiv:2306.08543), exact over the support.

    KL_t = Σ_i q_i (log q_i - log p_i)        ∂/∂log q_i = q_i (log q_i - log p_i + 1)

Always computed under the student's current weights: reverse KL does not tolerate a stale signal.
Infinite where the teacher excludes an outcome (log p = -inf) that the student does not. With a
floor, log p is max(log p, floor) in both formulas: finite, and the student's gradient is whole. The
sum can then be below 0, by no more than log Σ max(p, exp(floor)).
"""

from __future__ import annotations

import torch

from trainer.losses.base import Slopes


class ReverseKL:
    """KL(q ‖ p) of each row; ``floor`` is the least log p, in nats."""

    def __init__(self, floor: float | None = None) -> None:
        self._floor = floor

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        if self._floor is not None:
            log_p = log_p.clamp_min(self._floor)
        q = log_q.exp()
        terms = (log_q - log_p).mul_(q)
        return terms.sum(-1), q.add_(terms)
