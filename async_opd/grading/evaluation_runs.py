"""Makes the evaluations of a run: beside training, one at a time.

    version v is pushed ──► begin ──► answers, while later versions are trained and pushed
                                        └──► evals/step_N.jsonl ──► metrics at step N

No weight sync waits for an evaluation. One that is under way on the rollout replicas goes on with
the weights of later versions, and its metrics name the oldest and the newest. It belongs to the
step that made the oldest version of its answers. A version that is due while the evaluation before
is under way has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from async_opd.accounting.images import kept
from async_opd.core.samples import DeadLetter
from async_opd.core.stages import Stages
from async_opd.grading.evaluation import Evaluation, EvaluationResult
from async_opd.grading.evaluation_files import TEACHERS, of_step
from async_opd.grading.evaluation_schedule import Evaluations
from async_opd.waiting.race import in_thread

Result = TypeVar("Result")


class Bounded(Protocol):
    """See ``StallDetector.within``."""

    async def __call__(
        self,
        what: str,
        work: Awaitable[Result],
        least_s: float = 0.0,
        endless: bool = False,
    ) -> Result:
        """The work's result. StageTimeout when no stage makes progress."""
        ...


class EvaluationRuns:
    """Begins and finishes evaluations; ``schedule`` knows which are due and logs them."""

    def __init__(
        self,
        evaluation: Evaluation | None,
        schedule: Evaluations,
        stages: Stages,
        bounded: Bounded,
        *,
        version: Callable[[], int],
        ungraded: Callable[[Sequence[DeadLetter]], None],
        noted: Callable[[int, Mapping[str, float]], Awaitable[None]] | None,
    ) -> None:
        """``version()`` is the newest one that all replicas have; ``ungraded`` gets dead letters.

        ``noted`` gets the metrics of the student after a step, before they are logged.
        """
        self._evaluation = evaluation
        self._schedule = schedule
        self._stages = stages
        self._bounded = bounded
        self._version = version
        self._ungraded = ungraded
        self._noted = noted
        self._running: asyncio.Task[None] | None = None
        self.measured: int | None = None  # the step whose weights an evaluation began with

    def begin(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Begins the evaluation of the weights after ``step``, unless another one is under way."""
        if self._evaluation is None:
            return
        if self._running is not None and not self._running.done():
            self._schedule.skip(step)
            return
        self._running = tasks.create_task(self.measure("eval", step, endless=True))

    async def finished(self) -> None:
        """Waits for the evaluation that is under way. It has bounds of its own."""
        if self._running is not None:
            await self._running

    async def measure(self, prefix: str, step: int, endless: bool = False) -> None:
        """Measures and logs the student. ``step`` made the weights that all replicas have now.

        ``endless``: training goes on meanwhile.
        """
        if self._evaluation is None:
            return
        first, self.measured = self._version(), step
        try:
            async with self._images(prefix):
                work = self._evaluation.run(self._stages.rollouter.generate, prefix)
                measured = await self._bounded("the evaluation", work, endless=endless)
            # no replica answers with an older version; the newest one may be on some of them only
            oldest = measured.versions[0] if measured.versions else first
            if oldest > first:
                step = self._schedule.step_of(oldest)
            await self._record(measured, of_step(step))
            if self._noted is not None:
                await self._noted(step, measured.metrics)
        finally:
            self.measured = None
        self._publish(measured, step, max(first, oldest))

    async def measure_teachers(self, least_s: float) -> None:
        """Measures and logs the teachers, which report progress at least every ``least_s``."""
        if self._evaluation is not None:
            async with self._images(TEACHERS):
                work = self._evaluation.run_teachers(self._stages.scorer.generate)
                measured = await self._bounded("the evaluation of the teachers", work, least_s)
            await self._record(measured, TEACHERS)
            self._publish(measured, 0, self._version())

    def _images(self, owner: str) -> AbstractAsyncContextManager[None]:
        """The queue holds the prompts' images meanwhile."""
        assert self._evaluation is not None
        return kept(self._stages.queue, owner, self._evaluation.prompts)

    async def _record(self, measured: EvaluationResult, name: str) -> None:
        assert self._evaluation is not None
        # not beyond its cancellation: a rewind removes the files of evaluations that are undone
        self._schedule.left_out(name, await in_thread(self._evaluation.record, name, measured))

    def _publish(self, measured: EvaluationResult, step: int, version: int) -> None:
        self._ungraded(measured.dead_letters)
        self._schedule.log(measured.metrics, step, version)
