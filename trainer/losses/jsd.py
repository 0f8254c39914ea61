"""Generalized Jensen-Shannon divergence (GKD, arXiv:2306.13649, eq. 2).

    JSD_t = β Σ_i p_i (log p_i - log m_i) + (1 - β) Σ_i q_i (log q_i - log m_i)
    m = β p + (1 - β) q,     ∂/∂log q_i = (1 - β) q_i (log q_i - log m_i)

β = 0 is forward KL(p ‖ q), β = 1 reverse KL(q ‖ p). The formula itself is 0 at both ends; there the
field takes the KL that JSD/β, JSD/(1 - β) tend to.
"""

from __future__ import annotations

import math

import torch

from trainer.losses.base import DivergenceFunction, Slopes
from trainer.losses.forward_kl import MIN_LOG_PROB, ForwardKL
from trainer.losses.reverse_kl import ReverseKL


class JSD:
    """JSD of each row, for 0 < β < 1."""

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        beta = self._beta
        log_p = log_p.clamp_min(MIN_LOG_PROB)
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        from_p = (log_p - log_m).mul_(log_p.exp()).sum(-1)
        from_q = (log_q - log_m).mul_(log_q.exp()).mul_(1 - beta)
        return beta * from_p + from_q.sum(-1), from_q


def jsd(beta: float, floor: float | None = None) -> DivergenceFunction:
    """The divergence of a β, which at both ends is a KL; ``floor`` is reverse KL's."""
    return ForwardKL() if beta == 0 else ReverseKL(floor) if beta == 1 else JSD(beta)
