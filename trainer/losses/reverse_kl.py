"""Reverse KL(q ‖ p): mode seeking (MiniLLM, arXiv:2306.08543), exact over the support.

    KL_t = Σ_i q_i (log q_i - log p_i)        ∂/∂log q_i = q_i (log q_i - log p_i + 1)

q is always the student under its current weights: reverse KL does not tolerate stale ones. It is
infinite where the teacher excludes an outcome (log p = -inf) that the student does not. With a
floor, both formulas have max(log p, floor) in place of log p: they are finite, and log q keeps its
whole gradient. The sum can then be below 0, by no more than log Σ max(p, exp(floor)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import Slopes


@dataclass(frozen=True)
class ReverseKL:
    """KL(q ‖ p) of each row; ``floor`` is the least log p, in nats."""

    floor: float | None = None

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        if self.floor is not None:
            log_p = log_p.clamp_min(self.floor)
        q = log_q.exp()
        terms = (log_q - log_p).mul_(q)
        return terms.sum(-1), q.add_(terms)
