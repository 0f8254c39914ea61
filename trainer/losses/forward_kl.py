"""Forward KL(p ‖ q) over the teacher's top-k: mass covering, tolerant of staleness.

For support S and response token t (GKD, arXiv:2306.13649, eq. 1 with the teacher as target):

    KL_t = Σ_{i∈S} p_i (log p_i - log q_i)  +  tail

    tail    bucket       (1 - P) (log(1 - P) - log(1 - Q)),  P = Σ_S p_i,  Q = Σ_S q_i
            ignore       nothing: what is left can be negative, and is never clamped, since a clamp
                         at zero would remove the gradient of every such token
            renormalize  p and q are divided by P and Q first
"""

from __future__ import annotations

from typing import Literal

import torch

from trainer.losses.base import LossInputs, LossSums

TINY = 1e-9
"""Least mass of a tail bucket: log(1 - P) stays finite when the support holds all of it."""


class ForwardKL:
    """Sum over tokens of KL_t; the expectation over p is exact within the support."""

    def __init__(self, tail: Literal["bucket", "ignore", "renormalize"]) -> None:
        self._tail = tail

    def __call__(self, inputs: LossInputs) -> LossSums:
        """ValueError without the teacher's top-k."""
        if inputs.teacher_ids is None or inputs.teacher_topk_logprobs is None:
            raise ValueError("forward_kl needs the teacher's top-k, not sampled-token scores")
        log_p = inputs.teacher_topk_logprobs
        log_q = inputs.logprobs.gather(-1, inputs.teacher_ids)
        if self._tail == "renormalize":
            log_p = log_p - log_p.logsumexp(-1, keepdim=True)
            log_q = log_q - log_q.logsumexp(-1, keepdim=True)
        p = log_p.exp()
        kl = (p * (log_p - log_q)).sum(-1)
        mass = inputs.teacher_topk_logprobs.exp().sum(-1)
        if self._tail == "bucket":
            rest_p = (1 - mass).clamp_min(TINY)
            rest_q = (1 - log_q.exp().sum(-1)).clamp_min(TINY)
            kl = kl + torch.where(mass < 1 - TINY, rest_p * (rest_p.log() - rest_q.log()), 0.0)
        return LossSums(kl.sum(), {"teacher_topk_mass": mass.sum()})
