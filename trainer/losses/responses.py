"""Log-ratios of whole responses, for importance weights of whole responses.

    logits of a chunk ──► log q of the sampled tokens ─┐ all chunks
                                        log mu ────────┴──► Σ log q/mu of each response

Loss and gradient of a chunk are computed together, and a response may lie in several chunks:
therefore these sums take a pass over the chunks of their own, before the pass that computes
gradients. It costs one more product of hidden states and head, beside three for loss and gradients.
"""

from __future__ import annotations

import torch


def log_sampled(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """log q of the targets [n] at this temperature, in nats; overwrites the logits [n, V]."""
    if temperature != 1:
        logits.div_(temperature)
    peak = logits.amax(-1, keepdim=True)
    sampled = logits.gather(-1, targets[:, None]) - peak
    mass = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    return (sampled - mass.log())[:, 0]


def response_sums(values: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """For each token the sum of the values [N] over its response, [N] float64.

    ``starts`` int64 [N] is the row of the first token of its response.
    """
    sums = torch.zeros_like(values, dtype=torch.float64)
    return sums.index_add_(0, starts, values.double())[starts]
