"""Reverse KL(q ‖ p): mode seeking (MiniLLM, arXiv:2306.08543), exact over the support.

    KL_t = Σ_i q_i (log q_i - log p_i)        ∂/∂log q_i = q_i (log q_i - log p_i + 1)

Always computed under the student's current weights: reverse KL does not tolerate a stale signal.
Infinite where the teacher excludes an outcome (log p = -inf) that the student does not.
"""

from __future__ import annotations

import torch

from trainer.losses.base import Slopes


class ReverseKL:
    """KL(q ‖ p) of each row."""

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        q = log_q.exp()
        terms = (log_q - log_p).mul_(q)
        return terms.sum(-1), q.add_(terms)
