"""Between forward and reverse KL: the generalized Jensen-Shannon divergence.

GKD, arXiv:2306.13649, eq. 2:

    JSD_t = β Σ_i p_i (log p_i - log m_i) + (1 - β) Σ_i q_i (log q_i - log m_i)
    m = β p + (1 - β) q,     ∂/∂log q_i = (1 - β) q_i (log q_i - log m_i)

By convention β = 0 is forward KL(p ‖ q), the limit of JSD/β, and β = 1 reverse KL(q ‖ p), the limit
of JSD/(1 - β); the formula itself is 0 at both ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainer.losses.base import DivergenceFunction, Slopes
from trainer.losses.kl import MIN_LOG_PROB, ForwardKL, ReverseKL


@dataclass(frozen=True)
class JSD:
    """JSD of each row, for 0 < β < 1."""

    beta: float

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        beta = self.beta
        log_p = log_p.clamp_min(MIN_LOG_PROB)
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        from_p = (log_p - log_m).mul_(log_p.exp()).sum(-1)
        from_q = (log_q - log_m).mul_(log_q.exp()).mul_(1 - beta)
        return beta * from_p + from_q.sum(-1), from_q


def jsd(beta: float, floor: float | None = None) -> DivergenceFunction:
    """The divergence of a β in [0, 1]; ``floor`` is reverse KL's least log p, in nats."""
    return ForwardKL() if beta == 0 else ReverseKL(floor) if beta == 1 else JSD(beta)
