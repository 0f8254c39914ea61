"""Asks student and teacher for answers and scores, and pairs what they return.

    prompts ──student──► evaluated answers ──grade──► accuracy
       │       └──────► sampled responses ──student's and teacher's scores──► Response
       └─────teacher───► its answers ──grade──► accuracy ──its own scores──► how sure it is
             └ the same, after the prompts of its template

Models are asked behind two Protocols, so that ``engines`` can start them one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import RolloutFault
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.scores import SampledLogprobs, SupportScores, TopK
from async_opd.core.sequence import Float32
from async_opd.core.stages import SamplingSpec
from async_opd.grading.evaluation import GradeRollout
from async_opd.tools.doctor.distances import Float64
from async_opd.tools.probe.figures import UNGRADED, Measured, Response
from async_opd.waiting.deadline import gather_or_cancel

CALL = 64
"""Most prompts or rollouts in one call."""


class Answerer(Protocol):
    """A model that answers prompts."""

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """``sampling.n`` answers to each prompt, in order."""
        ...


class Scorer(Protocol):
    """A model that scores rollouts, as a teacher's replica does."""

    async def score(self, batch: Batch) -> Batch:
        """The samples of a batch of rollouts, in order."""
        ...


class Model(Answerer, Scorer, Protocol):
    """A model that does both."""


@dataclass(frozen=True)
class Asked:
    """The requests to every model: prompts, and how their answers are sampled and graded.

    ``evaluated`` is the sampling of evaluations, ``sampled`` that of the student's responses.
    ``other``: the prompts with ``teacher_ids`` of the teacher's own template, if the run gives it
    other ones. ``grade`` None: there is no grader.
    """

    prompts: Sequence[Prompt]
    evaluated: SamplingSpec
    sampled: SamplingSpec
    grade: GradeRollout | None
    other: Sequence[Prompt] | None = None


@dataclass(frozen=True)
class StudentAnswers:
    """Grades of evaluated answers [N], and the sampled responses with theirs, of each prompt."""

    grades: Float64
    rollouts: Sequence[Rollout]
    rollout_grades: Float64


async def ask_student(student: Answerer, asked: Asked) -> StudentAnswers:
    """The student's answers and responses."""
    grades, _ = await _answered(student, asked.prompts, asked)
    rollouts = await student.generate(asked.prompts, replace(asked.sampled, n=1))
    return StudentAnswers(grades, rollouts, await _graded(rollouts, asked.grade))


async def scored(model: Scorer, rollouts: Sequence[Rollout]) -> list[Sample]:
    """Samples of the rollouts, in order."""
    parts = [rollouts[at : at + CALL] for at in range(0, len(rollouts), CALL)]
    batches = await gather_or_cancel(*(model.score(Batch.pack(part)) for part in parts))
    return list(unpack(Sample, batches))


async def ask_teacher(
    teacher: Model,
    asked: Asked,
    answers: StudentAnswers,
    own_scores: Sequence[Sample],
    names: tuple[str, str],
) -> Measured:
    """Measures a pair. ``own_scores``: the student's of its rollouts; ``names``: source, teacher.

    ValueError for scores that are not top-k.
    """
    grades, own = await _answered(teacher, _read(asked.prompts), asked)
    found = await scored(teacher, answers.rollouts)
    own = [one for one in own if one.fault is None]
    certain = await scored(teacher, own)
    other_grades, others = None, list[Float32 | None]([None] * len(found))
    if asked.other is not None:
        other_grades, _ = await _answered(teacher, _read(asked.other), asked)
        seen = [
            replace(rollout, prompt=replace(rollout.prompt, teacher_ids=prompt.teacher_ids))
            for rollout, prompt in zip(answers.rollouts, asked.other, strict=True)
        ]
        others = [sampled_logprobs(one) for one in await scored(teacher, seen)]
    responses = [
        Response(float(grade), rollout.rollout_logprobs, _topk(one), _topk(itself), other)
        for grade, rollout, one, itself, other in zip(
            answers.rollout_grades, answers.rollouts, found, own_scores, others, strict=True
        )
    ]
    sure = [sampled_logprobs(one) for one in certain]
    calls = _read_calls(own, asked.evaluated.max_tokens)
    return Measured(*names, answers.grades, grades, responses, sure, other_grades, calls)


def _read_calls(episodes: Sequence[Rollout], most: int) -> float | None:
    """The share of tools' calls that could be read, in episodes without a turn that was cut off.

    A turn has ``most`` tokens at most. An episode counts one that was cut off as a call that cannot
    be read, and it says nothing about how the teacher writes calls.
    """
    whole = (
        one.episode
        for one in episodes
        if one.episode is not None
        and one.finish_reason != "length"
        and all(len(turn) < most for turn in one.turns)
    )
    numbers = [(one.calls, one.malformed) for one in whole]
    read, malformed = (sum(column) for column in zip(*numbers, strict=True)) if numbers else (0, 0)
    return read / (read + malformed) if read + malformed else None


def with_whole(measured: Measured, scores: Sequence[Sample]) -> Measured:
    """The pair, with the teacher's scores of its responses by the weights of its files."""
    both = zip(measured.responses, scores, strict=True)
    return replace(measured, responses=[replace(one, whole=_topk(own)) for one, own in both])


def _read(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with the tokens that the teacher reads."""
    return [prompt.for_teacher for prompt in prompts]


async def _answered(
    model: Answerer, prompts: Sequence[Prompt], asked: Asked
) -> tuple[Float64, list[Rollout]]:
    """The mean grade of each prompt's evaluated answers, and its first answer."""
    found = await model.generate(prompts, asked.evaluated)
    grades = await _graded(found, asked.grade)
    n = asked.evaluated.n
    return grades.reshape(len(prompts), n).mean(1), found[::n]


async def _graded(rollouts: Sequence[Rollout], grade: GradeRollout | None) -> Float64:
    """NaN without a grader, and for a response that it cannot grade."""
    if grade is None:
        return np.full(len(rollouts), math.nan)

    async def one(rollout: Rollout) -> float:
        try:
            return UNGRADED if rollout.fault else float(await grade(rollout))
        except RolloutFault:
            return UNGRADED

    return np.array(await gather_or_cancel(*map(one, rollouts)), np.float64)


def _topk(sample: Sample) -> TopK:
    if not isinstance(sample.scores, TopK):
        raise ValueError(f"{sample.rollout.uid}: {type(sample.scores).__name__} is not top-k")
    return sample.scores


def sampled_logprobs(sample: Sample) -> Float32:
    """The log-probabilities of the sampled tokens. ValueError for hidden states."""
    if isinstance(sample.scores, SampledLogprobs):
        return sample.scores.logprobs
    if isinstance(sample.scores, SupportScores):
        return sample.scores.sampled_logprobs
    raise ValueError(f"{sample.rollout.uid} has hidden states")
