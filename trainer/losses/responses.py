"""Log-ratios of whole responses, for importance weights of whole responses.

    logits of a chunk ──► log q of the sampled tokens ─┐ all chunks
                                        log mu ────────┴──► Σ log q/mu of each response

Loss and gradient of a chunk are computed together, and a response may lie in several chunks:
therefore these sums take a separate pass over the chunks, before the pass that computes
gradients. It costs one more product of hidden states and head, beside three for loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Sum = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks that share a micro-batch, in place."""


def log_sampled(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """log q of the targets [n] at this temperature, in nats; overwrites the logits [n, V]."""
    if temperature != 1:
        logits.div_(temperature)
    peak = logits.amax(-1, keepdim=True)
    sampled = logits.gather(-1, targets[:, None]) - peak
    mass = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    return (sampled - mass.log())[:, 0]


def response_sums(
    values: torch.Tensor, starts: torch.Tensor, of: int | None = None, over_ranks: Sum | None = None
) -> torch.Tensor:
    """For each token the sum of the values [N] over its response, [N] float64.

    ``starts`` int64 [N] is the row of the first token of its response. Where ranks share the
    micro-batch, it is the row among the ``of`` tokens of all ranks, which call this together.
    """
    sums = values.new_zeros(len(values) if of is None else of, dtype=torch.float64)
    sums.index_add_(0, starts, values.double())
    if over_ranks is not None:
        over_ranks(sums)
    return sums[starts]
