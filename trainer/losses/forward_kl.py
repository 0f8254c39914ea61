"""Forward KL(p ‖ q): mass covering, tolerant of stale samples (arXiv:2606.24143).

    KL_t = Σ_i p_i (log p_i - log q_i)        ∂/∂log q_i = -p_i

The expectation over the teacher's p is exact within the support; nothing of it is sampled.
Outcomes that the teacher excludes (log p = -inf) count as 0.
"""

from __future__ import annotations

import torch

from trainer.losses.base import Slopes

MIN_LOG_PROB = -1e4
"""Stands for log 0 of the teacher: exp gives 0, and 0 times it gives 0, not NaN."""


class ForwardKL:
    """KL(p ‖ q) of each row."""

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        log_p = log_p.clamp_min(MIN_LOG_PROB)
        p = log_p.exp()
        value = (p * (log_p - log_q)).sum(-1)
        return value, p.neg_()
