"""A divergence over part of the vocabulary: k tokens, and what becomes of the rest.

tail    bucket       the k tokens, and everything else as one more outcome: two distributions,
                     so that every divergence of them is one of coarser distributions
        ignore       the k tokens as they are: a divergence can be negative, and is never
                     clamped at 0, since that would remove the gradient of every such token
        renormalize  the k tokens, p and q both scaled to sum to 1

The k tokens may be the teacher's best or the student's: the formulas are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trainer.losses.base import Divergence

Tail = Literal["bucket", "ignore", "renormalize"]

TINY = 1e-9
"""Least mass of the teacher's bucket, so that its logarithm is finite where rounding leaves none.
The student's bucket has no such floor: it would remove the gradient of a collapsed student."""


@dataclass(frozen=True)
class SupportSlopes:
    """A value per token [n], and its derivatives: [n, k] by log q_i, [n, 1] by log q of the rest.

    ``rest`` is None where the rest has no part in the loss.
    """

    value: torch.Tensor
    slope: torch.Tensor
    rest: torch.Tensor | None = None


def on_support(
    divergence: Divergence,
    tail: Tail,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    log_rest: torch.Tensor | None,
) -> SupportSlopes:
    """The divergence of log p and log q [n, k]; ``log_rest`` [n, 1] is log q of all other tokens.

    It is None for a support of the whole vocabulary, which leaves nothing for a bucket.
    """
    if tail == "renormalize":
        return _renormalized(divergence, log_p, log_q)
    if tail == "ignore" or log_rest is None:
        return SupportSlopes(*divergence(log_p, log_q))
    value, slope = divergence(
        torch.cat([log_p, teacher_rest(log_p)], dim=-1), torch.cat([log_q, log_rest], dim=-1)
    )
    return SupportSlopes(value, slope[:, :-1], slope[:, -1:])


def _renormalized(
    divergence: Divergence, log_p: torch.Tensor, log_q: torch.Tensor
) -> SupportSlopes:
    """With q' = q / Q: ∂/∂log q_i = slope_i - q'_i Σ_j slope_j."""
    scaled = log_q.log_softmax(-1)
    value, slope = divergence(log_p.log_softmax(-1), scaled)
    return SupportSlopes(value, slope - scaled.exp() * slope.sum(-1, keepdim=True))


def teacher_rest(log_p: torch.Tensor) -> torch.Tensor:
    """log(1 - P), [N, 1]: only the k tokens are here. Accurate to the rounding of P."""
    return (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(TINY).log()
