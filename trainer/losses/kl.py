"""Divergences between the teacher's p and the student's q, exact over the support.

Forward KL(p ‖ q): mass covering, tolerant of stale samples (arXiv:2606.24143).

    KL_t = Σ_i p_i (log p_i - log q_i)        ∂/∂log q_i = -p_i

The expectation over the teacher's p is the exact sum over the support, no estimate from samples.
An outcome that the teacher excludes (log p = -inf) adds 0.

Reverse KL(q ‖ p): mode seeking (MiniLLM, arXiv:2306.08543).

    KL_t = Σ_i q_i (log q_i - log p_i)        ∂/∂log q_i = q_i (log q_i - log p_i + 1)

q is always the student under its current weights: reverse KL does not tolerate stale ones. It is
infinite where the teacher excludes an outcome (log p = -inf) that the student does not. With a
floor, both formulas have max(log p, floor) in place of log p: they are finite, and log q keeps its
whole gradient. The sum can then be below 0, by no more than log Σ max(p, exp(floor)).

Mixed KL: a KL(p ‖ q) + (1 - a) KL(q ‖ p), the default of NeMo-RL's distillation with a = 1/2. It is
not bounded as JSD is, and keeps reverse KL's gradient where q is far above p.

JSD, the generalized Jensen-Shannon divergence: between the two KLs (GKD, arXiv:2306.13649, eq. 2).

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

MIN_LOG_PROB = -1e4
"""Replaces the teacher's log 0, in nats: its exp is 0, and 0 times it is 0; 0 · -inf is NaN."""


class ForwardKL:
    """KL(p ‖ q) of each row."""

    def __call__(self, log_p: torch.Tensor, log_q: torch.Tensor) -> Slopes:
        log_p = log_p.clamp_min(MIN_LOG_PROB)
        p = log_p.exp()
        value = (p * (log_p - log_q)).sum(-1)
        return value, p.neg_()


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
