"""Accuracy where some answers cannot be graded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.grading.evaluation import Evaluation, EvaluationResult
from async_opd.grading.graders import Grade
from tests.conftest import make_prompt, make_rollout
from tests.world.clock import run_virtually

PROMPTS = tuple(make_prompt(uid) for uid in ("p", "q", "r"))


async def measured(ungradable: set[str]) -> EvaluationResult:
    async def grade(rollout: Rollout) -> float:
        if rollout.prompt.uid in ungradable:
            raise RolloutFault("grader", f"it raised on {rollout.uid}")
        return float(rollout.prompt.uid == "p")

    async def answers(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        return [make_rollout(f"{prompt.uid}/0") for prompt in prompts]

    return await Evaluation(PROMPTS, SamplingSpec(4, 0.0, 1.0, 1), grade).run(answers, "eval")


async def test_accuracy_is_that_of_the_graded_answers_and_the_others_are_counted() -> None:
    found = await measured({"r"})
    assert (found.metrics["eval/t/accuracy"], found.metrics["eval/t/ungraded"]) == (0.5, 1.0)
    (lost,) = found.dead_letters
    assert (lost.header.uid, lost.stage, lost.reason) == (
        "eval r/0",
        "grader",
        "it raised on r/0",
    )
    assert "eval/t/ungraded" not in (await measured(set())).metrics


async def test_an_answer_with_a_fault_is_ungraded_for_its_cause() -> None:
    async def answers(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        fault = RolloutFault("environment", "its process died")
        r = prompts[2]
        return [*map(make_rollout, ("p/0", "q/0")), Rollout.unanswered("r/0", r, fault)]

    found = await Evaluation(PROMPTS, SamplingSpec(4, 0.0, 1.0, 1), right).run(answers, "eval")
    (lost,) = found.dead_letters
    assert (lost.stage, lost.reason) == ("environment", "its process died")
    assert (found.metrics["eval/t/accuracy"], found.metrics["eval/t/ungraded"]) == (1.0, 1.0)


async def test_a_data_source_of_which_nothing_can_be_graded_is_an_error() -> None:
    with pytest.raises(StageError, match="no answer of data source t can be graded: it raised"):
        await measured({"p", "q", "r"})


def test_the_metrics_have_the_seconds_of_the_evaluation() -> None:
    async def answers(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        await asyncio.sleep(3)
        return list(map(make_rollout, ("p/0", "q/0", "r/0")))

    async def measured_twice() -> list[float]:
        evaluation = Evaluation(PROMPTS, SamplingSpec(4, 0.0, 1.0, 1), right)
        found = [await evaluation.run(answers, "eval") for _ in range(2)]
        return [one.metrics["eval/seconds"] for one in found]

    assert run_virtually(measured_twice()) == pytest.approx([3, 3])


TWO = (make_prompt("p", "t"), make_prompt("q", "u"))


async def right(rollout: Rollout) -> float:
    return 1.0


async def test_an_error_of_one_teacher_ends_the_evaluation_of_the_others() -> None:
    ended: list[str] = []

    async def answers(teacher: str, *_: Any) -> list[Rollout]:
        if teacher == "u":
            raise StageError("teacher u", "no replica is left")
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.append(teacher)

    with pytest.raises(StageError, match="no replica is left"):
        await Evaluation(TWO, SamplingSpec(4, 0.0, 1.0, 1), right).run_teachers(answers)
    assert ended == ["t"]


def test_the_teachers_take_as_long_as_the_slowest_one() -> None:
    async def answers(teacher: str, prompts: Sequence[Prompt], *_: Any) -> list[Rollout]:
        await asyncio.sleep(5 if teacher == "t" else 1)
        return [make_rollout(f"{prompt.uid}/0", teacher) for prompt in prompts]

    evaluation = Evaluation(TWO, SamplingSpec(4, 0.0, 1.0, 1), right)
    found = run_virtually(evaluation.run_teachers(answers))
    assert found.metrics["eval_teacher/seconds"] == 5


async def test_several_answers_to_a_prompt_give_pass_at_k_and_the_versions_of_all_tokens() -> None:
    async def grade(rollout: Rollout) -> float:
        return float(rollout.uid.endswith("/1"))

    async def answers(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        return [
            make_rollout(f"{prompt.uid}/{index}", version=3 + index)
            for prompt in prompts
            for index in range(sampling.n)
        ]

    evaluation = Evaluation(PROMPTS, SamplingSpec(4, 1.0, 1.0, 2), grade)
    metrics = (await evaluation.run(answers, "eval")).metrics
    assert [metrics[f"eval/t/{key}"] for key in ("mean@2", "pass@1", "pass@2")] == [0.5, 0.5, 1.0]
    assert [metrics[f"eval/{key}_version"] for key in ("oldest", "newest")] == [3, 4]


async def majorities(verified: frozenset[str]) -> list[float | None]:
    """maj@2 of the sources t and u; only for one of t's prompts is an answer read."""

    async def answers(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        return [make_rollout(f"{one.uid}/{i}", one.data_source) for one in prompts for i in (0, 1)]

    async def grade(rollout: Rollout) -> Grade:
        return Grade(1.0, "3") if rollout.prompt.uid == "p" else Grade(0.0)

    prompts = (make_prompt("p", "t"), make_prompt("q", "t"), make_prompt("r", "u"))
    sampling = SamplingSpec(4, 1.0, 1.0, 2)
    evaluation = Evaluation(prompts, sampling, grade, verified=verified)
    metrics = (await evaluation.run(answers, "eval")).metrics
    return [metrics.get(f"eval/{source}/maj@2") for source in ("t", "u")]


async def test_a_source_without_votes_is_wrong_unless_only_anothers_verifier_reads() -> None:
    assert await majorities(frozenset()) == [0.5, 0.0]
    assert await majorities(frozenset({"t"})) == [0.5, None]
