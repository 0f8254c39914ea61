"""Forward KL(p ‖ q): mass covering, tolerant of stale samples (arXiv:2606.24143).

    KL_t = Σ_i p_i (log p_i - log q_i)        over the outcomes of ``support.py``

The expectation over the teacher's p is exact within the support; nothing of it is sampled.
"""

from __future__ import annotations

from trainer.losses.base import LossInputs, LossSums
from trainer.losses.support import Tail, on_teacher_topk, topk_mass


class ForwardKL:
    """Sum over tokens of KL_t."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail

    def __call__(self, inputs: LossInputs) -> LossSums:
        """ValueError without the teacher's top-k."""
        log_p, log_q = on_teacher_topk(inputs, self._tail)
        loss = (log_p.exp() * (log_p - log_q)).sum()
        return LossSums(loss, {"teacher_topk_mass": topk_mass(inputs)})
