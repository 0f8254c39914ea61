"""What an importance weight of a whole response needs before its tokens have a gradient.

    logits of a chunk ──► log q of the sampled tokens ─┐ all chunks
                                        log mu ────────┴──► Σ log q/mu of each response

Loss and gradient of a chunk are made at once, and a response may lie in several chunks: so these
sums have a pass over the chunks of their own, before the first one that makes gradients. It costs
one more product of hidden states and head, beside the three of loss and gradients.
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
    """Of each token [N] the sum of the values [N] over its response, float64.

    ``starts`` int64 [N] is the row of the first token of each one's response.
    """
    sums = torch.zeros_like(values, dtype=torch.float64)
    return sums.index_add_(0, starts, values.double())[starts]
