"""Between forward and reverse KL: the generalized Jensen-Shannon divergence, and their sum.

JSD (GKD, arXiv:2306.13649, eq. 2):

    JSD_t = β Σ_i p_i (log p_i - log m_i) + (1 - β) Σ_i q_i (log q_i - log m_i)
    m = β p + (1 - β) q,     ∂/∂log q_i = (1 - β) q_i (log q_i - log m_i)

By convention β = 0 is forward KL(p ‖ q), the limit of JSD/β, and β = 1 reverse KL(q ‖ p), the limit
of JSD/(1 - β); the formula itself is 0 at both ends.

Mixed KL: a KL(p ‖ q) + (1 - a) KL(q ‖ p), the default of NeMo-RL's distillation with a = 1/2. It is
not bounded as JSD is, and keeps reverse KL's gradient where q is far above p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainer.losses.base import DivergenceFunction, Slopes
from trainer.losses.forward_kl import MIN_LOG_PROB, ForwardKL
from trainer.losses.reverse_kl import ReverseKL


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


@dataclass(frozen=True)
class MixedKL:
    """a KL(p ‖ q) + (1 - a) KL(q ‖ p) of each row, a in [0, 1]; ``floor`` as for reverse KL."""

    forward_weight: float
    floor: float | None = None

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        weight = self.forward_weight
        if weight in (0, 1):  # 0 times the infinite other would be NaN
            return (ForwardKL() if weight == 1 else ReverseKL(self.floor))(log_p, log_q)
        forward, by_forward = ForwardKL()(log_p, log_q)
        reverse, by_reverse = ReverseKL(self.floor)(log_p, log_q)
        slope = by_forward.mul_(weight).add_(by_reverse, alpha=1 - weight)
        return weight * forward + (1 - weight) * reverse, slope


def jsd(beta: float, floor: float | None = None) -> DivergenceFunction:
    """The divergence of a β in [0, 1]; ``floor`` is reverse KL's least log p, in nats."""
    return ForwardKL() if beta == 0 else ReverseKL(floor) if beta == 1 else JSD(beta)
