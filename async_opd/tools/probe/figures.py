"""The figures of a student and a teacher, by their answers and scores.

grades of both ──► accuracies, headroom          responses scored by both ──► gaps, overlap, reach
grades and scores under the teacher's own template ──► what the run's template costs
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from async_opd.core.scores import TopK
from async_opd.core.sequence import Float32
from async_opd.tools.doctor.distances import Agreement, Float64, Positions, PrecisionBias

UNGRADED = math.nan
LEAST_LOGPROB = -100.0
COVERED, LEAST_TOP_K = 0.99, 8
"""Of a suggested top-k: its share of the scored mass, at this share of the positions; fewer tokens
than ``LEAST_TOP_K`` would save nothing."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts or responses, and its standard error.

    ``stderr`` is the sample standard deviation (denominator: values - 1) over the square root of
    their number; of a single value its size, since it says nothing about others.
    """

    mean: float
    stderr: float

    @classmethod
    def of(cls, values: Iterable[float] | NDArray[Any]) -> Self | None:
        """Of the values that are not NaN; None if there are none."""
        found = np.asarray(list(values), np.float64)
        found = found[~np.isnan(found)]
        if not len(found):
            return None
        one = len(found) == 1
        spread = abs(found[0]) if one else found.std(ddof=1) / math.sqrt(len(found))
        return cls(float(found.mean()), float(spread))

    def exceeds(self, least: float, errors: float) -> bool:
        """Whether the mean is above ``least``, and above 0 by so many standard errors."""
        return self.mean > least and self.mean > errors * self.stderr


@dataclass(frozen=True)
class Response:
    """One response that the student sampled, scored by both models.

    ``grade`` is 0 to 1, NaN if there is none. ``other``: the teacher's log-probabilities of its
    tokens after the prompt of the teacher's own template. ``whole``: the scores of a teacher of low
    precision with the weights of its files.
    """

    grade: float
    rollout_logprobs: Float32
    teacher: TopK
    student: TopK
    other: Float32 | None = None
    whole: TopK | None = None


@dataclass(frozen=True)
class Measured:
    """All that was measured of one source and its teacher.

    Grades are of each prompt's evaluated answer, in the same order, NaN where there is none;
    ``other_grades`` those of the teacher with its own template. ``own``: the teacher's
    log-probabilities of its answers. ``calls``: of its calls of tools the share that can be read,
    in episodes without a turn that was cut off.
    """

    source: str
    teacher: str
    student_grades: Float64
    teacher_grades: Float64
    responses: Sequence[Response]
    own: Sequence[Float32] = ()
    other_grades: Float64 | None = None
    calls: float | None = None


@dataclass(frozen=True)
class PositionGap:
    """Mean divergences in nats of the positions ``first`` to ``last`` of responses, from 0 on."""

    first: int
    last: int
    tokens: int
    forward: float
    reverse: float


@dataclass(frozen=True)
class Start:
    """The token that the teacher most expects first, over all prompts; both models' mean mass.

    The student's counts as 0 where the token is outside of its top-k.
    """

    token: int
    teacher: float
    student: float


@dataclass(frozen=True)
class Template:
    """The gain of the teacher's own template over the prompts of the run, for each prompt or token.

    ``accuracy``: of the teacher's answers. ``logprob``: nats of each token of the student's
    responses, of the right ones where there are grades.
    """

    accuracy: Estimate | None
    logprob: Estimate | None


@dataclass(frozen=True)
class PairFigures:
    """The figures of one source and its teacher; means are over response tokens unless noted.

    ``headroom``: the teacher's accuracy minus the student's, with the standard error of paired
    prompts. ``bias``: log q - log p per token of the student's right responses, a mean over them;
    accuracy does not explain it. ``own_start``, ``own_later``: the teacher's log-probability of the
    first and the other tokens of its answers. ``floor``: the student scored by itself against
    what it was sampled with. ``top_k``: the least power of two that has 99 % of the
    teacher's scored mass at 99 % of the positions. ``precision``: of a teacher of low precision,
    if it was measured with the weights of its files. ``calls``: of an environment's tools, the
    share of the teacher's own that can be read.
    """

    source: str
    teacher: str
    prompts: int
    tokens: int
    student_accuracy: Estimate | None
    teacher_accuracy: Estimate | None
    headroom: Estimate | None
    overlap: float
    reach: float
    shared: float
    forward: float
    reverse: float
    by_position: tuple[PositionGap, ...]
    first_gap: float
    later_gap: float
    bias: Estimate | None
    start: Start
    own_start: float | None
    own_later: float | None
    template: Template | None
    floor: Agreement
    top_k: int
    precision: PrecisionBias | None = None
    calls: float | None = None


def figures_of(measured: Measured) -> PairFigures:
    """ValueError if no response has a token, or the models' grades are of other prompts."""
    responses = [one for one in measured.responses if len(one.teacher.ids)]
    if not responses or len(measured.student_grades) != len(measured.teacher_grades):
        raise ValueError(f"{measured.source}: {len(responses)} responses with tokens")
    found = [Positions.of(one.teacher, one.student) for one in responses]
    forward, reverse = ([getattr(one, name) for one in found] for name in ("forward", "reverse"))
    mean = {
        name: float(np.concatenate([getattr(one, name) for one in found]).mean())
        for name in ("overlap", "reach", "shared", "forward", "reverse")
    }
    later = np.concatenate([one[1:] for one in forward])
    starts, rest = _own(measured.own)
    return PairFigures(
        source=measured.source,
        teacher=measured.teacher,
        prompts=len(measured.student_grades),
        tokens=sum(map(len, forward)),
        student_accuracy=Estimate.of(measured.student_grades),
        teacher_accuracy=Estimate.of(measured.teacher_grades),
        headroom=Estimate.of(measured.teacher_grades - measured.student_grades),
        **mean,
        by_position=tuple(_by_position(forward, reverse)),
        first_gap=float(np.mean([one[0] for one in forward])),
        later_gap=float(later.mean()) if len(later) else 0.0,
        bias=Estimate.of(_bias(one) for one in responses if one.grade >= 1),
        start=_start(responses),
        own_start=starts,
        own_later=rest,
        template=_template(measured, responses),
        floor=Agreement.of(
            [one.rollout_logprobs for one in responses],
            [one.student.sampled_logprobs for one in responses],
        ),
        top_k=_least_top_k(responses),
        precision=_precision(responses),
        calls=measured.calls,
    )


def _precision(responses: Sequence[Response]) -> PrecisionBias | None:
    whole = [one.whole for one in responses if one.whole is not None]
    low, student = [one.teacher for one in responses], [one.student for one in responses]
    return PrecisionBias.of(whole, low, student) if whole else None


def _bias(one: Response) -> float:
    return float(np.mean(one.student.sampled_logprobs - _bounded(one.teacher.sampled_logprobs)))


def _bounded(logprobs: Float32) -> Float32:
    """At least ``LEAST_LOGPROB``, so that a token that a teacher excludes leaves means finite."""
    return np.maximum(logprobs, np.float32(LEAST_LOGPROB), dtype=np.float32)


def _by_position(forward: Sequence[Float64], reverse: Sequence[Float64]) -> Iterable[PositionGap]:
    """The first position, the second, and then ranges that double: 2-3, 4-7, …"""
    longest, first, last = max(map(len, forward)), 0, 0
    while first < longest:
        one, other = (
            np.concatenate([values[first : last + 1] for values in side])
            for side in (forward, reverse)
        )
        yield PositionGap(first, last, len(one), float(one.mean()), float(other.mean()))
        first, last = last + 1, 2 * last + 1


def _start(responses: Sequence[Response]) -> Start:
    count = len(responses)
    masses = [_first_masses(one.teacher for one in responses)]
    masses += [_first_masses(one.student for one in responses)]
    token = max(masses[0], key=lambda one: masses[0][one])
    return Start(token, *(side.get(token, 0.0) / count for side in masses))


def _first_masses(scores: Iterable[TopK]) -> dict[int, float]:
    """The sum over responses of each token's probability at the first position."""
    sums: dict[int, float] = {}
    for one in scores:
        for token, logprob in zip(one.ids[0].tolist(), one.logprobs[0].tolist(), strict=True):
            sums[token] = sums.get(token, 0.0) + math.exp(logprob)
    return sums


def _own(answers: Sequence[Float32]) -> tuple[float | None, float | None]:
    bounded = [_bounded(one) for one in answers if len(one)]
    firsts = [float(one[0]) for one in bounded]
    others = np.concatenate([np.zeros(0), *(one[1:] for one in bounded)])
    return (
        float(np.mean(firsts)) if firsts else None,
        float(others.mean()) if len(others) else None,
    )


def _template(measured: Measured, responses: Sequence[Response]) -> Template | None:
    if measured.other_grades is None:
        return None
    graded = any(not math.isnan(one.grade) for one in responses)
    differences = (
        float(np.mean(_bounded(one.other) - _bounded(one.teacher.sampled_logprobs)))
        for one in responses
        if one.other is not None and (one.grade >= 1 or not graded)
    )
    accuracy = Estimate.of(measured.other_grades - measured.teacher_grades)
    return Template(accuracy, Estimate.of(differences))


def _least_top_k(responses: Sequence[Response]) -> int:
    """See PairFigures; at least ``LEAST_TOP_K``, at most what was scored."""
    masses = np.exp(np.concatenate([one.teacher.logprobs for one in responses]).astype(np.float64))
    within = np.cumsum(masses, 1)
    needed = (within < COVERED * within[:, -1:]).sum(1) + 1
    least = max(LEAST_TOP_K, int(np.quantile(needed, COVERED, method="higher")))
    return min(1 << (least - 1).bit_length(), int(masses.shape[1]))
