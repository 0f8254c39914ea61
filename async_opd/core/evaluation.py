"""Accuracy per data source: who answers is a parameter, how answers are graded is not."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec

Answers = Callable[[Sequence[Prompt], SamplingSpec], Awaitable[list[Rollout]]]
Grade = Callable[[Rollout], float]


@dataclass(frozen=True)
class Evaluation:
    """The evaluation prompts, how to sample and how to grade them.

    ``grade`` returns 0 to 1 for a rollout of one of the prompts; it may take long (it runs in a
    thread).
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingSpec
    grade: Grade

    async def run(self, answers: Answers, prefix: str) -> dict[str, float]:
        """Metrics ``<prefix>/<source>/accuracy``, ``…/response_tokens`` and ``…/truncated``.

        Each is a mean over the rollouts of the data source. ``<prefix>/seconds``: how long it took.
        """
        return await self._measure(self.prompts, answers, prefix)

    async def run_teachers(
        self, answers: Callable[[str, Sequence[Prompt], SamplingSpec], Awaitable[list[Rollout]]]
    ) -> dict[str, float]:
        """``eval_teacher/<source>/…``: each teacher on the data sources it is responsible for."""
        by_teacher: dict[str, list[Prompt]] = defaultdict(list)
        for prompt in self.prompts:
            by_teacher[prompt.teacher].append(prompt)

        async def one(teacher: str, prompts: Sequence[Prompt]) -> dict[str, float]:
            async def answer(asked: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
                return await answers(teacher, asked, sampling)

            return await self._measure(prompts, answer, "eval_teacher")

        parts = await asyncio.gather(*(one(name, own) for name, own in by_teacher.items()))
        return {key: value for part in parts for key, value in part.items()}

    async def _measure(
        self, prompts: Sequence[Prompt], answers: Answers, prefix: str
    ) -> dict[str, float]:
        clock = asyncio.get_running_loop().time
        started = clock()
        rollouts = await answers(prompts, self.sampling)
        grades = await asyncio.to_thread(lambda: [self.grade(rollout) for rollout in rollouts])
        rows: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        for rollout, grade in zip(rollouts, grades, strict=True):
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
        return means | {f"{prefix}/seconds": clock() - started}
