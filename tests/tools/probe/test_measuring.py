"""The requests to models, and how their answers and scores become a pair's measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import RolloutFault
from async_opd.core.samples import EpisodeFacts, Prompt, Rollout, Sample
from async_opd.core.scores import SampledLogprobs, Scores, TopK
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid, rollout_uid
from async_opd.grading.graders import GradeError
from async_opd.tools.probe.figures import Measured
from async_opd.tools.probe.measuring import (
    CALL,
    Asked,
    StudentAnswers,
    ask_student,
    ask_teacher,
    scored,
)

GREEDY, SAMPLED = SamplingSpec(4, 0.0, 1.0, 1), SamplingSpec(4, 1.0, 1.0, 1)
PROMPTS = [Prompt(Uid(f"p{at}"), "s", "t", np.array([at, 7], np.int32)) for at in range(3)]
RIGHT, WRONG = 1, 2


@dataclass
class Table:
    """Answers ``RIGHT`` to prompts that begin with one of ``knows``; keeps what it was asked."""

    knows: Sequence[int] = ()
    asked: list[list[int]] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    kind: type[TopK] | None = TopK

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        self.asked += [one.token_ids.tolist() for one in prompts]
        return [
            Rollout.answer(rollout_uid(one.uid, index), one, [self._token(one)], "stop")
            for one in prompts
            for index in range(sampling.n)
        ]

    def _token(self, prompt: Prompt) -> int:
        return RIGHT if prompt.token_ids[0] in self.knows else WRONG

    async def score(self, batch: Batch) -> Batch:
        rollouts = list(unpack(Rollout, [batch]))
        self.sizes.append(len(rollouts))
        self.seen += [one.for_teacher.token_ids.tolist() for one in rollouts]
        return Batch.pack(Sample(one, self._scores(one)) for one in rollouts)

    def _scores(self, rollout: Rollout) -> Scores:
        first = float(rollout.for_teacher.token_ids[0])
        logs = np.log(np.array([[0.6, 0.4]], np.float32))
        own = np.full(1, -first, np.float32)
        if self.kind is None:
            return SampledLogprobs(own)
        return TopK(np.array([[1, 2]], np.int32), logs, own, np.full(1, -100.0, np.float32))


class Expanding(Table):
    """A student whose prompts get two more tokens, as for an image, before they are answered."""

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        longer = (np.append(one.token_ids, np.int32([7, 7])) for one in prompts)
        expanded = [replace(one, token_ids=ids) for one, ids in zip(prompts, longer, strict=True)]
        return await super().generate(expanded, sampling)


async def grade(rollout: Rollout) -> float:
    if rollout.prompt.uid == "p2":
        raise GradeError("grader", "it failed")
    return float(rollout.response_ids[0] == RIGHT)


ASKED = Asked(PROMPTS, GREEDY, SAMPLED, grade)


def measured(student: Table, teacher: Table, asked: Asked = ASKED) -> Measured:
    async def ask() -> Measured:
        answers = await ask_student(student, asked)
        own = await scored(student, answers.rollouts)
        return await ask_teacher(teacher, asked, answers, own, ("s", "t"))

    return asyncio.run(ask())


def test_both_models_are_graded_on_the_same_prompts() -> None:
    found = measured(Table([0]), Table([0, 1]))
    assert found.student_grades[:2].tolist() == [1, 0]
    assert found.teacher_grades[:2].tolist() == [1, 1]


def test_an_answer_that_cannot_be_graded_is_in_no_mean() -> None:
    found = measured(Table([0]), Table([0, 1]))
    assert np.isnan(found.student_grades[2])
    assert np.isnan(found.responses[2].grade)


def test_without_a_grader_nothing_is_graded() -> None:
    found = measured(Table([0]), Table([0, 1]), replace(ASKED, grade=None))
    assert np.isnan(found.student_grades).all()
    assert np.isnan(found.teacher_grades).all()


def test_several_answers_to_a_prompt_count_with_their_mean() -> None:
    found = measured(Table([0]), Table(), replace(ASKED, evaluated=replace(SAMPLED, n=4)))
    assert found.student_grades[:2].tolist() == [1, 0]
    assert len(found.responses) == len(found.own) == 3


def test_the_teacher_reads_its_own_prompts_and_scores_the_students_responses() -> None:
    prompts = [replace(one, teacher_ids=np.array([5, 5, 5], np.int32)) for one in PROMPTS]
    student, teacher = Table(), Table()
    measured(student, teacher, replace(ASKED, prompts=prompts))
    assert student.asked[0] == [0, 7]
    assert teacher.asked[0] == [5, 5, 5]
    assert teacher.seen[0] == [5, 5, 5, WRONG]


def test_the_teachers_own_template_is_asked_too() -> None:
    other = [replace(one, teacher_ids=np.array([1, 9], np.int32)) for one in PROMPTS]
    found = measured(Table(), Table([1]), replace(ASKED, other=other))
    assert found.other_grades is not None
    assert found.other_grades[:2].tolist() == [1, 1]
    assert found.teacher_grades[:2].tolist() == [0, 1]
    assert [one.other for one in found.responses] == [-1, -1, -1]
    assert [one.teacher.sampled_logprobs for one in found.responses] == [0, -1, -2]


def test_the_teachers_own_template_is_asked_after_prompts_whose_images_have_many_tokens() -> None:
    other = [replace(one, teacher_ids=np.array([1, 9], np.int32)) for one in PROMPTS]
    teacher = Table()
    measured(Expanding(), teacher, replace(ASKED, other=other))
    assert teacher.seen[-3:] == [[1, 9, WRONG]] * 3


@dataclass
class Player(Table):
    """Its answers are episodes, one after the other those with these facts and tokens."""

    facts: Sequence[tuple[EpisodeFacts, int]] = ()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        return [
            replace(Rollout.answer(f"{one.uid}/0", one, [RIGHT] * tokens, "stop"), episode=facts)
            for one, (facts, tokens) in zip(prompts, self.facts, strict=True)
        ]

    def _scores(self, rollout: Rollout) -> Scores:
        return SampledLogprobs(np.zeros(len(rollout.response_ids), np.float32))


def test_the_share_of_calls_that_can_be_read_leaves_out_turns_that_were_cut_off() -> None:
    facts = [
        (EpisodeFacts(1, calls=2, malformed=1), 1),
        (EpisodeFacts(1, malformed=1), GREEDY.max_tokens),
        (EpisodeFacts(1, calls=1), 3),
    ]
    teacher = Player(facts=facts)
    answers = StudentAnswers(np.zeros(3), [], np.zeros(0))
    found = asyncio.run(ask_teacher(teacher, ASKED, answers, [], ("s", "t")))
    assert found.calls == 3 / 4


def test_an_episode_with_a_fault_is_in_no_mean() -> None:
    class Failing(Table):
        async def generate(self, prompts: Sequence[Prompt], _: SamplingSpec) -> list[Rollout]:
            fault = RolloutFault("environment", "its process died")
            return [Rollout.unanswered(f"{one.uid}/0", one, fault) for one in prompts]

    answers = StudentAnswers(np.zeros(3), [], np.zeros(0))
    found = asyncio.run(ask_teacher(Failing(), ASKED, answers, [], ("s", "t")))
    assert np.isnan(found.teacher_grades).all()
    assert not found.own


def test_a_call_has_a_bounded_number_of_rollouts() -> None:
    student = Table()
    rollouts = asyncio.run(student.generate([PROMPTS[0]] * (2 * CALL + 1), SAMPLED))
    assert len(asyncio.run(scored(student, rollouts))) == len(rollouts)
    assert student.sizes == [CALL, CALL, 1]


def test_scores_that_are_no_top_k_are_refused() -> None:
    with pytest.raises(ValueError, match="SampledLogprobs is not top-k"):
        measured(Table(), Table(kind=None))
