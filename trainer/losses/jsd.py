"""Generalized Jensen-Shannon divergence (GKD, arXiv:2306.13649, eq. 2).

    JSD_t = β Σ_i p_i (log p_i - log m_i) + (1 - β) Σ_i q_i (log q_i - log m_i)
    m = β p + (1 - β) q,     β = 0: forward KL(p ‖ q),     β = 1: reverse KL(q ‖ p)

The formula itself is 0 at both ends; there the field takes the KL that JSD/β, JSD/(1 - β) tend to.
"""

from __future__ import annotations

import math

import torch

from trainer.losses.base import LossInputs, LossSums
from trainer.losses.support import Tail, on_teacher_topk, topk_mass


class JSD:
    """Sum over tokens of JSD_t."""

    def __init__(self, beta: float, tail: Tail) -> None:
        self._beta = beta
        self._tail = tail

    def __call__(self, inputs: LossInputs) -> LossSums:
        """ValueError without the teacher's top-k."""
        log_p, log_q = on_teacher_topk(inputs, self._tail)
        return LossSums(self._sum(log_p, log_q), {"teacher_topk_mass": topk_mass(inputs)})

    def _sum(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        if self._beta == 0:
            return (log_p.exp() * (log_p - log_q)).sum()
        if self._beta == 1:
            return (log_q.exp() * (log_q - log_p)).sum()
        log_m = torch.logaddexp(log_p + math.log(self._beta), log_q + math.log(1 - self._beta))
        from_p = (log_p.exp() * (log_p - log_m)).sum()
        from_q = (log_q.exp() * (log_q - log_m)).sum()
        return self._beta * from_p + (1 - self._beta) * from_q
