"""How far two models' next tokens are apart, by the top-k of both at each response position.

    ids in both top-k, ids that one side alone has, the rest ──► KL in both directions
    ids of the teacher's top-k ──in the student's?──► overlap, reach

The divergences are those of two coarser distributions, and where a top-k does not say how a mass
is split, of the split that makes them smallest: lower bounds of the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from async_opd.core.scores import TopK

Float64 = NDArray[np.float64]
REACHED = 1e-3
"""Least probability of a token that a student reaches: one of a thousand samples has it."""
LEAST = 1e-9
"""Least probability of the outcome that stands for all other tokens, and of any token: it bounds
each divergence by 20.7 nats."""


@dataclass(frozen=True)
class Positions:
    """Figures of R response positions, float64 [R] each.

    ``forward`` is KL(teacher ‖ student), ``reverse`` KL(student ‖ teacher), in nats, at least 0.
    ``overlap``: ids in both top-k / k. ``reach``: the teacher's mass on tokens of the student's
    top-k to which the student gives at least ``REACHED``. ``shared``: 1 minus the total variation
    distance; an upper bound.
    """

    forward: Float64
    reverse: Float64
    overlap: Float64
    reach: Float64
    shared: Float64

    @classmethod
    def of(cls, teacher: TopK, student: TopK) -> Positions:
        """ValueError for another number of positions; k may differ, overlap is of the smaller."""
        if len(teacher.ids) != len(student.ids):
            raise ValueError(f"{len(teacher.ids)} positions and {len(student.ids)}")
        common = teacher.ids[:, :, None] == student.ids[:, None, :]  # [R, k, k]
        p, q = (np.exp(one.logprobs.astype(np.float64)) for one in (teacher, student))
        in_student, in_teacher = common.any(2), common.any(1)
        both = np.where(in_student, p, 0.0)
        q_there = (common * q[:, None, :]).sum(2)  # q of the teacher's ids; 0 outside its top-k
        p_only, q_only = (p * ~in_student).sum(1), (q * ~in_teacher).sum(1)
        p_rest, q_rest = _rest(teacher, p), _rest(student, q)
        unseen = _unseen(p_only, p_rest, q_only, q_rest)
        ps = _outcomes(both, p_only + p_rest - unseen, unseen)
        forward = _divergence(ps, _outcomes(q_there, q_rest, q_only))
        unseen = _unseen(q_only, q_rest, p_only, p_rest)
        qs = _outcomes(q_there, q_only + q_rest - unseen, unseen)
        reverse = _divergence(qs, _outcomes(both, p_rest, p_only))
        apart = np.minimum(p_rest, q_only) + np.minimum(p_only, q_rest)
        apart = np.minimum(apart + np.minimum(p_rest, q_rest), p_only + p_rest)
        return cls(
            forward=forward,
            reverse=reverse,
            overlap=in_student.sum(1) / max(min(p.shape[1], q.shape[1]), 1),
            reach=(p * (in_student & (q_there >= REACHED))).sum(1),
            shared=np.minimum(both, q_there).sum(1) + np.minimum(apart, q_only + q_rest),
        )


def _outcomes(common: Float64, one: Float64, other: Float64) -> Float64:
    """Common tokens [R, k] and two more outcomes, [R, k + 2]."""
    return np.asarray(np.hstack([common, one[:, None], other[:, None]]))


def _unseen(only: Float64, rest: Float64, others: Float64, others_rest: Float64) -> Float64:
    """The part of a side's ``rest`` on tokens that only the other side's top-k has.

    It is not known: the one that makes the divergence smallest, at most ``rest``.
    """
    share = others / np.maximum(others + others_rest, LEAST)
    return np.asarray(np.minimum(rest, (only + rest) * share))


def _rest(scores: TopK, mass: Float64) -> Float64:
    """The mass outside of a top-k; a server does not send it, and 1 minus the sum rounds."""
    if scores.rest_logprobs is None:
        return np.asarray(np.clip(1 - mass.sum(1), 0.0, 1.0))
    return np.asarray(np.exp(scores.rest_logprobs.astype(np.float64)))


def _divergence(one: Float64, other: Float64) -> Float64:
    """Σ one log(one / other), at least 0 (rounding); an outcome without mass adds nothing."""
    ratio = np.log(np.maximum(one, LEAST)) - np.log(np.maximum(other, LEAST))
    return np.asarray(np.maximum((one * ratio).sum(1), 0.0))
