"""Reverse KL(q ‖ p): mode seeking (MiniLLM, arXiv:2306.08543), exact over the support.

    KL_t = Σ_i q_i (log q_i - log p_i)        over the outcomes of ``support.py``

Always computed under the student's current weights: reverse KL does not tolerate a stale signal.
"""

from __future__ import annotations

from trainer.losses.base import LossInputs, LossSums
from trainer.losses.support import Tail, on_teacher_topk, topk_mass


class ReverseKL:
    """Sum over tokens of KL_t."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail

    def __call__(self, inputs: LossInputs) -> LossSums:
        """ValueError without the teacher's top-k."""
        log_p, log_q = on_teacher_topk(inputs, self._tail)
        loss = (log_q.exp() * (log_q - log_p)).sum()
        return LossSums(loss, {"teacher_topk_mass": topk_mass(inputs)})
