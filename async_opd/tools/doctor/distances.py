"""How far models are apart on the same response tokens.

    log-probabilities of the tokens, computed in two places ──► Agreement
    ids in both top-k, ids that one side alone has, the rest ──► KL in both directions
    ids of the teacher's top-k ──in the student's?──► overlap, reach

The divergences are those of two coarser distributions, and where a top-k does not say how a mass
is split, of the split that makes them smallest: lower bounds of the true ones.

How far low precision moves a teacher is shown beside what the teacher is for. P and L read the
teacher's prompt, Q the student's.

the student's responses ──teacher, weights of its files──► P ──┬──► signal: KL(P ‖ Q)
         │  └─────────────teacher, as the run has it─────► L ──┴──► bias: KL(P ‖ L)
         └────────────────student────────────────────────► Q
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import VllmTeacher
from async_opd.core.errors import Problem
from async_opd.core.scores import TopK
from async_opd.core.sequence import Float32
from async_opd.models.model_files import ModelFiles

Float64 = NDArray[np.float64]
REACHED = 1e-3
"""Least probability of a token that a student reaches: one of a thousand samples has it."""
LEAST = 1e-9
"""Least probability of the outcome that stands for all other tokens, and of any token: it bounds
each divergence by 20.7 nats."""
REMEDY = "take the weights as in its files or a finer scheme, or raise"


@dataclass(frozen=True)
class Agreement:
    """Of ``tokens``: mean and largest absolute difference, and mean signed one, in nats."""

    tokens: int
    mean: float
    largest: float
    bias: float

    @classmethod
    def of(cls, one: Sequence[Float32], other: Sequence[Float32]) -> Agreement:
        """``bias`` is the mean of ``one`` minus ``other``. ValueError for other lengths.

        Tokens that both exclude (-inf) are equal; without any token all is 0.
        """
        pairs = list(zip(one, other, strict=True))
        if any(a.shape != b.shape for a, b in pairs):
            raise ValueError(f"{[a.shape for a, _ in pairs]} and {[b.shape for _, b in pairs]}")
        first, second = (
            np.concatenate([np.zeros(0), *(pair[at] for pair in pairs)]).astype(np.float64)
            for at in (0, 1)
        )
        differing = first != second
        apart = np.zeros(len(first))
        apart[differing] = first[differing] - second[differing]
        size = np.abs(apart)
        if not len(apart):
            return cls(0, 0.0, 0.0, 0.0)
        return cls(len(apart), float(size.mean()), float(size.max()), float(apart.mean()))

    def __str__(self) -> str:
        return (
            f"mean |Δ| {self.mean:.2g}, largest {self.largest:.2g}, bias {self.bias:+.2g} nats "
            f"over {self.tokens} tokens"
        )


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


@dataclass(frozen=True)
class PrecisionBias:
    """Means over ``tokens`` response positions, in nats: ``bias`` KL(P ‖ L), ``signal`` KL(P ‖ Q).

    P is the teacher with the weights of its files, L the same in the run's precision, Q the
    student. The responses are sampled from the student at temperature 1, as those of a run are, and
    the sums go over tokens by P. Both are lower bounds by top-k (see above).
    ``share`` is bias / signal, whose denominator is the signal of the teacher of whole precision;
    None without a signal: this teacher is the student.
    """

    tokens: int
    bias: float
    signal: float
    share: float | None

    @classmethod
    def of(cls, whole: Sequence[TopK], low: Sequence[TopK], student: Sequence[TopK]) -> Self:
        """Of the scores of the same responses. ValueError for other lengths, or without a token."""
        both = list(zip(whole, low, student, strict=True))
        if not sum(len(one.ids) for one in whole):
            raise ValueError("no response has a token")
        moved = np.concatenate([Positions.of(own, other).forward for own, other, _ in both])
        taught = np.concatenate([Positions.of(own, other).forward for own, _, other in both])
        bias, signal = float(moved.mean()), float(taught.mean())
        return cls(len(moved), bias, signal, bias / signal if signal else None)

    def __str__(self) -> str:
        share = "the signal is 0:" if self.share is None else f"{self.share:.1%} of the signal"
        return (
            f"its precision has a bias of {self.bias:.2g} nats a token: {share} "
            f"KL(teacher ‖ student) {self.signal:.2g}, over {self.tokens} tokens"
        )

    def problem(self, where: str, name: str, most: float) -> Problem | None:
        """Refuses teacher ``name`` if its bias is more than ``most`` of the signal."""
        if self.bias <= most * self.signal:
            return None
        key = f"teachers.{name}.max_bias"
        return Problem(where, key, f"{self}; found {most:g}, more is refused", f"{REMEDY} {key}")


def unknown_bias(config: RunConfig, where: str, name: str) -> Problem | None:
    """The problem of teacher ``name`` whose own files are quantized: P is not there."""
    teacher = config.teachers[name]
    files = ModelFiles.read(teacher.model) if isinstance(teacher, VllmTeacher) else None
    if files is None or not files.quantized:
        return None
    message = (
        "the bias of its precision is unknown: its files are quantized; a bias that is shown is "
        "that of its engine's settings alone"
    )
    remedy = "name the model as it was before, with engine.quantization, to measure it"
    return Problem(where, f"teachers.{name}", message, remedy)
