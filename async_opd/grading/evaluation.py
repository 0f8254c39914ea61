"""Accuracy per data source, of the student or of the teachers, whose answers are graded alike.

prompts ──answers──► rollouts ──grade──► answers with grades ──► metrics (accuracy.py)
                                                 └──record──► evals/step_N.jsonl
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.samples import DeadLetter, Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.grading.accuracy import measures
from async_opd.grading.graders import Grade
from async_opd.waiting.deadline import gather_or_cancel

Answers = Callable[[Sequence[Prompt], SamplingSpec], Awaitable[list[Rollout]]]
GradeRollout = Callable[[Rollout], Awaitable[float]]


@dataclass(frozen=True)
class Answer:
    """A rollout with its grade, or the reason why it has none."""

    rollout: Rollout
    grade: Grade | None
    lost: DeadLetter | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics, and the answers they were made of, in the order of the prompts."""

    metrics: dict[str, float]
    answers: tuple[Answer, ...] = ()

    @property
    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """The rollouts that could not be graded, which are in no mean."""
        return tuple(answer.lost for answer in self.answers if answer.lost is not None)

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of all tokens; None where there are none."""
        spans = (span for answer in self.answers for span in answer.rollout.version_spans)
        found = {span.version for span in spans}
        return (min(found), max(found)) if found else None


Record = Callable[[str, EvaluationResult], int]


@dataclass(frozen=True)
class Evaluation:
    """The evaluation prompts, how to sample and how to grade them.

    ``grade`` returns 0 to 1 for a rollout of one of the prompts, or raises RolloutFault; it bounds
    its own time and its number of concurrent calls. An answer is correct whose grade is at least
    ``correct_at``. ``record`` keeps the answers under a name and returns how
    many it could not; it blocks: callers use a thread.
    ``close`` ends the grader's processes. ``verified``: data sources whose own verifier grades
    them; one grader grades all others.
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingSpec
    grade: GradeRollout
    close: Callable[[], None] = lambda: None
    correct_at: float = 1.0
    record: Record = lambda name, result: 0
    verified: frozenset[str] = frozenset()

    @property
    def requests(self) -> int:
        """The number of answers."""
        return len(self.prompts) * self.sampling.n

    async def run(self, answers: Answers, prefix: str) -> EvaluationResult:
        """Metrics of the student's answers, by data source; see ``accuracy.measures``.

        ``<prefix>/<source>/accuracy``, ``…/mean@n``, ``…/pass@k`` and others; ``…/response_tokens``
        and ``…/truncated`` are means over the graded answers, ``…/ungraded`` counts the others, if
        there are any. ``<prefix>/seconds`` is the time from first request to last grade,
        ``<prefix>/oldest_version`` and ``…/newest_version`` are those of all tokens.
        StageError if no rollout of a data source can be graded.
        """
        found = await self._measure(self.prompts, answers, prefix)
        if found.versions is not None:
            oldest, newest = map(float, found.versions)
            found.metrics[f"{prefix}/oldest_version"] = oldest
            found.metrics[f"{prefix}/newest_version"] = newest
        return found

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
        metrics = {key: value for part in parts for key, value in part.metrics.items()}
        metrics["eval_teacher/seconds"] = max(
            part.metrics["eval_teacher/seconds"] for part in parts
        )
        return EvaluationResult(metrics, tuple(answer for part in parts for answer in part.answers))

    async def _measure(
        self, prompts: Sequence[Prompt], answers: Answers, prefix: str
    ) -> EvaluationResult:
        clock = asyncio.get_running_loop().time
        started = clock()
        rollouts = await answers(prompts, self.sampling)
        graded = await gather_or_cancel(*map(self._graded, rollouts))
        by_source: dict[str, list[Answer]] = defaultdict(list)
        for answer in graded:
            by_source[answer.rollout.prompt.data_source].append(answer)
        metrics: dict[str, float] = {}
        reading = {
            one.rollout.prompt.data_source in self.verified
            for one in graded
            if one.grade is not None and one.grade.answer is not None
        }  # of the two kinds of graders
        for source, own in by_source.items():
            found = self._of_source(source, own, votes=(source in self.verified) in reading)
            metrics |= {f"{prefix}/{source}/{key}": value for key, value in found.items()}
        metrics[f"{prefix}/seconds"] = clock() - started
        return EvaluationResult(metrics, tuple(graded))

    def _of_source(self, source: str, answers: Sequence[Answer], votes: bool) -> dict[str, float]:
        by_prompt: dict[Uid, list[Grade]] = defaultdict(list)
        for one in answers:
            if one.grade is not None:
                by_prompt[one.rollout.prompt.uid].append(one.grade)
        lost = [one.lost for one in answers if one.lost is not None]
        if not by_prompt:
            cause = f"no answer of data source {source} can be graded: {lost[0].reason}"
            raise StageError("grader", cause, "see eval.grader")
        metrics = measures(list(by_prompt.values()), self.sampling.n, self.correct_at, votes)
        rollouts = [one.rollout for one in answers if one.grade is not None]
        metrics["response_tokens"] = fmean(len(one.response_ids) for one in rollouts)
        metrics["truncated"] = fmean(one.finish_reason == "length" for one in rollouts)
        if episodes := [one.episode for one in rollouts if one.episode is not None]:
            correct = [grade >= self.correct_at for own in by_prompt.values() for grade in own]
            metrics["success"] = fmean(correct)
            metrics["turns"] = fmean(one.turns for one in episodes)
            metrics["tool_calls"] = fmean(one.calls for one in episodes)
        return metrics | ({"ungraded": float(len(lost))} if lost else {})

    async def _graded(self, rollout: Rollout) -> Answer:
        try:
            if rollout.fault is not None:
                raise rollout.fault
            return Answer(rollout, Grade(await self.grade(rollout)))
        except RolloutFault as fault:
            uid = Uid(f"eval {rollout.uid}")
            lost = DeadLetter.of_prompt(rollout.prompt, uid, fault.stage, fault.cause)
            return Answer(rollout, None, lost)
