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
"""Least mass of the teacher's bucket, so that its logarithm is finite where rounding leaves none.
The student's bucket has no such floor: it would remove the gradient of a collapsed student."""


def on_teacher_topk(inputs: LossInputs, tail: Tail) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q over the outcomes, each [N, k], or [N, k + 1] with a bucket.

    A support of the whole vocabulary leaves nothing for a bucket.

    ValueError without the teacher's top-k.
    """
    if inputs.teacher_ids is None or inputs.teacher_topk_logprobs is None:
        raise ValueError("this objective needs the teacher's top-k, not sampled-token scores")
    log_p = inputs.teacher_topk_logprobs
    log_q = inputs.logprobs.gather(-1, inputs.teacher_ids)
    if tail == "renormalize":
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    if tail == "bucket" and log_p.shape[-1] < inputs.logprobs.shape[-1]:
        log_p = torch.cat([log_p, _teacher_rest(log_p)], dim=-1)
        log_q = torch.cat([log_q, _student_rest(inputs.logprobs, inputs.teacher_ids)], dim=-1)
    return log_p, log_q


def topk_mass(inputs: LossInputs) -> torch.Tensor:
    """Sum over tokens of the teacher's mass on its top-k; 1 a token means nothing is left out."""
    assert inputs.teacher_topk_logprobs is not None
    return inputs.teacher_topk_logprobs.exp().sum()


def _teacher_rest(log_p: torch.Tensor) -> torch.Tensor:
    """log(1 - P), [N, 1]: only the teacher's top-k is here. Accurate to the rounding of P."""
    return (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(TINY).log()


def _student_rest(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log(1 - Q), [N, 1], summed over the tokens outside of the support.

    1 - Q itself would cancel to 0 in float32 for a student that is sure of the support, just where
    the teacher's mass outside of it has to pull back.
    """
    outside = logprobs.scatter(-1, ids, -torch.inf)
    return outside.logsumexp(-1, keepdim=True)
