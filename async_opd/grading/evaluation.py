"""Accuracy per data source, of the student or of the teachers, whose answers are graded alike."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import DeadLetter, Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.waiting.race import gather_or_cancel

Answers = Callable[[Sequence[Prompt], SamplingSpec], Awaitable[list[Rollout]]]
Grade = Callable[[Rollout], Awaitable[float]]


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics, and the rollouts that could not be graded, which are in no mean."""

    metrics: dict[str, float]
    dead_letters: tuple[DeadLetter, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """The evaluation prompts, how to sample and how to grade them.

    ``grade`` returns 0 to 1 for a rollout of one of the prompts, or raises RolloutFault; it bounds
    its own time and its number of concurrent calls. ``close`` ends its processes.
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingSpec
    grade: Grade
    close: Callable[[], None] = lambda: None

    async def run(self, answers: Answers, prefix: str) -> EvaluationResult:
        """Metrics ``<prefix>/<source>/accuracy``, ``…/response_tokens`` and ``…/truncated``.

        Each is a mean over the graded rollouts of the data source; ``…/ungraded`` counts the
        others, if there are any. ``<prefix>/seconds`` is the time from first request to last grade.
        StageError if no rollout of a data source can be graded.
        """
        return await self._measure(self.prompts, answers, prefix)

    async def run_teachers(
        self, answers: Callable[[str, Sequence[Prompt], SamplingSpec], Awaitable[list[Rollout]]]
    ) -> EvaluationResult:
        """``eval_teacher/<source>/…``: each teacher on its own prompts."""
        by_teacher: dict[str, list[Prompt]] = defaultdict(list)
        for prompt in self.prompts:
            by_teacher[prompt.teacher].append(prompt)

        async def one(teacher: str, prompts: Sequence[Prompt]) -> EvaluationResult:
            async def answer(asked: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
                return await answers(teacher, asked, sampling)

            return await self._measure(prompts, answer, "eval_teacher")

        parts = await gather_or_cancel(*(one(name, own) for name, own in by_teacher.items()))
        return EvaluationResult(
            {key: value for part in parts for key, value in part.metrics.items()},
            tuple(letter for part in parts for letter in part.dead_letters),
        )

    async def _measure(
        self, prompts: Sequence[Prompt], answers: Answers, prefix: str
    ) -> EvaluationResult:
        clock = asyncio.get_running_loop().time
        started = clock()
        rollouts = await answers(prompts, self.sampling)
        grades = await gather_or_cancel(*map(self._grade, rollouts))
        rows: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        letters: dict[str, list[DeadLetter]] = defaultdict(list)
        for rollout, grade in zip(rollouts, grades, strict=True):
            if isinstance(grade, DeadLetter):
                letters[rollout.prompt.data_source].append(grade)
                continue
            rows[rollout.prompt.data_source].append(
                {
                    "accuracy": grade,
                    "response_tokens": float(len(rollout.response_ids)),
                    "truncated": float(rollout.finish_reason == "length"),
                }
            )
        means = {
            f"{prefix}/{source}/{key}": sum(row[key] for row in own) / len(own)
            for source, own in rows.items()
            for key in own[0]
        }
        for source, failed in letters.items():
            if source not in rows:
                cause = f"no answer of data source {source} can be graded: {failed[0].reason}"
                raise StageError("grader", cause, "see eval.grader")
            means[f"{prefix}/{source}/ungraded"] = float(len(failed))
        means[f"{prefix}/seconds"] = clock() - started
        return EvaluationResult(means, tuple(one for failed in letters.values() for one in failed))

    async def _grade(self, rollout: Rollout) -> float | DeadLetter:
        try:
            return await self.grade(rollout)
        except RolloutFault as fault:
            uid = Uid(f"eval {rollout.uid}")
            return DeadLetter.of_prompt(rollout.prompt, uid, fault.stage, fault.cause)
