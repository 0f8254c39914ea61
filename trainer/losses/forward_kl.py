"""Forward KL(p ‖ q): mass covering, tolerant of stale samples (arXiv:2606.24143).

    KL_t = Σ_i p_i (log p_i - log q_i)        ∂/∂log q_i = -p_i

The expectation over the teacher's p is the exact sum over the support, no estimate from samples.
An outcome that the teacher excludes (log p = -inf) adds 0.
"""

from __future__ import annotations

import torch

from trainer.losses.base import Slopes

MIN_LOG_PROB = -1e4
"""Replaces the teacher's log 0, in nats: its exp is 0, and 0 times it is 0; 0 · -inf is NaN."""


class ForwardKL:
    """KL(p ‖ q) of each row."""

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        log_p = log_p.clamp_min(MIN_LOG_PROB)
        p = log_p.exp()
        value = (p * (log_p - log_q)).sum(-1)
        return value, p.neg_()
