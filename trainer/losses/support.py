"""A divergence over part of the vocabulary: k tokens, and three ways to treat the rest.

tail    bucket       the k tokens, and everything else as one more outcome: two distributions,
                     so that every divergence of them is one of coarser distributions
        ignore       the k tokens as they are: a divergence can be negative, and is never
                     clamped at 0, since that would remove the gradient of every such token
        renormalize  the k tokens, p and q both scaled to sum to 1

The k tokens may be the teacher's most probable or the student's: the formulas are the same.
Neither side's rest is computed as 1 - P, which float32 rounds away below 1e-5: both are sums over
the tokens outside. The student's bucket has no floor, which would remove the gradient of a
collapsed student.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trainer.losses.base import DivergenceFunction

Tail = Literal["bucket", "ignore", "renormalize"]


@dataclass(frozen=True)
class SupportSlopes:
    """A value per token [n], and its derivatives: [n, k] by log q_i, [n, 1] by log q of the rest.

    ``rest`` is None where the loss does not depend on the rest.
    """

    value: torch.Tensor
    slope: torch.Tensor
    rest: torch.Tensor | None = None


def on_support(
    divergence: DivergenceFunction,
    tail: Tail,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    rest: tuple[torch.Tensor, torch.Tensor] | None,
) -> SupportSlopes:
    """The divergence of log p and log q [n, k]; ``rest`` is log p and log q [n, 1] of all others.

    It is None for a support of the whole vocabulary, which has no rest.
    """
    if tail == "renormalize":  # with q' = q / Q: ∂/∂log q_i = slope_i - q'_i Σ_j slope_j
        scaled = log_q.log_softmax(-1)
        value, slope = divergence(log_p.log_softmax(-1), scaled)
        return SupportSlopes(value, slope - scaled.exp() * slope.sum(-1, keepdim=True))
    if tail == "ignore" or rest is None:
        return SupportSlopes(*divergence(log_p, log_q))
    value, slope = divergence(
        torch.cat([log_p, rest[0]], dim=-1), torch.cat([log_q, rest[1]], dim=-1)
    )
    return SupportSlopes(value, slope[:, :-1], slope[:, -1:])
