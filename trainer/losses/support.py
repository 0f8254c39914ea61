"""Teacher and student on the teacher's top-k: the outcomes a divergence sums over.

tail    bucket       the k tokens, and everything else as one more outcome: two distributions,
so that every divergence of them is one of coarser distributions
ignore       the k tokens as they are: a divergence can be negative, and is never
clamped, since a clamp would remove the gradient of every such token
renormalize  the k tokens, p and q both scaled to sum to 1
"""

from __future__ import annotations

from typing import Literal

import torch

from trainer.losses.base import LossInputs

Tail = Literal["bucket", "ignore", "renormalize"]

TINY = 1e-9
"""Least mass of a tail bucket, so that its logarithm is finite when the support holds all."""


def on_teacher_topk(inputs: LossInputs, tail: Tail) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q over the outcomes, each [N, k], or [N, k + 1] with a bucket.

    ValueError without the teacher's top-k.
    """
    if inputs.teacher_ids is None or inputs.teacher_topk_logprobs is None:
        raise ValueError("this objective needs the teacher's top-k, not sampled-token scores")
    log_p = inputs.teacher_topk_logprobs
    log_q = inputs.logprobs.gather(-1, inputs.teacher_ids)
    if tail == "renormalize":
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    if tail == "bucket":
        log_p, log_q = _with_bucket(log_p), _with_bucket(log_q)
    return log_p, log_q


def topk_mass(inputs: LossInputs) -> torch.Tensor:
    """Sum over tokens of the teacher's mass on its top-k; 1 a token means nothing is left out."""
    assert inputs.teacher_topk_logprobs is not None
    return inputs.teacher_topk_logprobs.exp().sum()


def _with_bucket(logprobs: torch.Tensor) -> torch.Tensor:
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(TINY).log()
    return torch.cat([logprobs, rest], dim=-1)
