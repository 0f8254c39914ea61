"""Makes the evaluations of a run: beside training, one at a time.

    version v is pushed ──► begin ──► answers, while later versions are trained and pushed
                                        └──► evals/step_N.jsonl ──► metrics at step N

No weight sync waits for an evaluation. One that is under way on the rollout replicas goes on with
the weights of later versions, and its metrics name the oldest and the newest. It belongs to the
step that made the oldest version of its answers. A version that is due while the evaluation before
is under way has none, unless that one measures it. At a step within a version that is due
(``eval.every_steps``) an evaluation begins with the weights that the engines have; it belongs to
that step, though another one made them.

The evaluations that a run has to make, and the step to which each belongs.

    version v is pushed ── due ──────► evaluation, from v on ──► logged at the step that made v
    the run is resumed ── missing ──► evaluation, from the checkpoint's weights on ──► at its step

Training goes on during an evaluation: the step at which the evaluation ends is not the step of the
weights that were measured, and a resume would cut an evaluation that was logged there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from async_opd.accounting.images import ImagesInFlight
from async_opd.accounting.run_state import Cut
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.evaluation import EvalConfig
from async_opd.core.samples import DeadLetter
from async_opd.core.stages import Log, Stages
from async_opd.grading.evaluation import Evaluation, EvaluationResult
from async_opd.grading.evaluation_files import TEACHERS, of_step
from async_opd.waiting.deadline import in_thread

Result = TypeVar("Result")


class Evaluations:
    """``logged`` is the last step whose evaluation is in the metrics; -1 if there is none."""

    def __init__(self, config: RunConfig, log: Log, logged: int = -1) -> None:
        self._between = config.steps_between(config.eval)
        self._steps, self._sync_steps = config.train.steps, config.async_.sync_steps
        self._log = log
        self._logged = logged
        self._why: dict[int, str] = {}

    def step_of(self, version: int) -> int:
        """The step that completes the weights of a version."""
        return min(version * self._sync_steps, self._steps)

    def is_due(self, step: int) -> bool:
        """Whether the engines' weights at a step are measured; the last ones are after training."""
        return bool(self._between) and step % self._between == 0 and step < self._steps

    def is_missing(self, cut: Cut) -> bool:
        """Whether a run that resumes at the consistent cut lacks the last evaluation before it.

        It was interrupted during that evaluation. The weights of that version may not exist any
        more: the checkpoint's weights are measured instead, at the checkpoint's step.
        """
        if not self._between or cut.step >= self._steps:
            return False
        due = cut.step - cut.step % self._between
        return due > 0 and self._logged < due

    @property
    def is_last_missing(self) -> bool:
        """Whether the evaluation after the last step is missing."""
        return self._logged < self._steps

    def has(self, step: int) -> bool:
        """Whether an evaluation of the weights after ``step``, or of later ones, is logged."""
        return step <= self._logged

    def skip(self, step: int, why: str) -> None:
        """Keeps why the weights after ``step`` have no evaluation, until the next one is logged."""
        self._why[step] = why

    def _name_missing(self, step: int) -> None:
        """Says which due evaluations before the one of ``step`` there will never be, and why."""
        due = range(self._between, min(step, self._steps), self._between) if self._between else ()
        missing = [at for at in due if self._logged < at]
        for at in (one for one in missing if one in self._why):
            self._log.message(f"step {at}: no evaluation, since {self._why[at]}")
        if others := [at for at in missing if at not in self._why]:
            first, last = others[0], others[-1]
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            why = "the run was interrupted, or eval.every was another"
            self._log.message(f"{steps}: no evaluation, since {why}; step {step} has the next one")

    def left_out(self, name: str, answers: int) -> None:
        """Says that a file of ``evals/`` lacks so many answers."""
        if answers:
            self._log.message(
                f"evals/{name}.jsonl lacks {answers} answers, which eval.samples_mib leaves no room"
            )

    def log(self, metrics: Mapping[str, float], step: int, version: int) -> None:
        """Logs an evaluation at the step of the oldest ``version`` that it measured."""
        self._log.summarize(metrics)
        self._log.log(step, metrics)
        newest = int(metrics.get("eval/newest_version", version))
        versions = f"versions {version} to {newest}" if newest > version else f"version {version}"
        if any(key.startswith("eval/") for key in metrics):
            self._name_missing(step)
            self._logged = max(self._logged, step)
        found = ", ".join(
            f"{key.removesuffix('/accuracy')} {value:.1%}"
            for key, value in metrics.items()
            if key.endswith("/accuracy")
        )
        self._log.message(f"step {step}, {versions}: {found}")


class Bounded(Protocol):
    """See ``StallDetector.within``."""

    async def __call__(
        self, what: str, work: Awaitable[Result], least_s: float = 0.0, endless: bool = False
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
        images: ImagesInFlight,
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
        self._images_in_flight = images
        self._version = version
        self._ungraded = ungraded
        self._noted = noted
        self._running: asyncio.Task[None] | None = None
        self.measured: int | None = None  # the step whose weights an evaluation began with

    def begin(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Begins the evaluation of the weights after ``step``.

        Not if another one is under way, or has measured these weights already.
        """
        if self._evaluation is None or self._schedule.has(step):
            return
        if self._running is not None and not self._running.done():
            why = "the one before was still under way: it takes longer than the steps between two"
            self._schedule.skip(step, why)
            return
        self._running = tasks.create_task(self.measure("eval", step, endless=True))

    async def measure_first(
        self, wanted: EvalConfig, logged: Collection[str], least_s: float
    ) -> None:
        """Measures student and teachers before the first step, without what is ``logged``.

        ``logged`` are names of metrics: all of them, unless a run that goes on after step 0 was
        interrupted meanwhile. Teachers report progress at least every ``least_s``.
        """
        measured = {name.partition("/")[0] for name in logged}
        if wanted.before and "eval_initial" not in measured:
            await self.measure("eval_initial", 0)
        if wanted.teachers and "eval_teacher" not in measured:
            await self._measure_teachers(least_s)

    async def finished(self) -> None:
        """Waits for the evaluation that is under way. It has separate bounds."""
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
            later = self._schedule.step_of(oldest)
            if later > step:
                self._schedule.skip(step, f"its engines had the weights after step {later} by then")
                step = later
            await self._record(measured, of_step(step))
            if self._noted is not None:
                await self._noted(step, measured.metrics)
        finally:
            self.measured = None
        self._publish(measured, step, max(first, oldest))

    async def _measure_teachers(self, least_s: float) -> None:
        assert self._evaluation is not None
        async with self._images(TEACHERS):
            work = self._evaluation.run_teachers(self._stages.scorer.generate)
            measured = await self._bounded("the evaluation of the teachers", work, least_s)
        await self._record(measured, TEACHERS)
        self._publish(measured, 0, self._version())

    def _images(self, owner: str) -> AbstractAsyncContextManager[None]:
        """The queue holds the prompts' images meanwhile."""
        assert self._evaluation is not None
        return self._images_in_flight.kept(self._stages.queue, owner, self._evaluation.prompts)

    async def _record(self, measured: EvaluationResult, name: str) -> None:
        assert self._evaluation is not None
        # not beyond its cancellation: a rewind removes the files of evaluations that are undone
        self._schedule.left_out(name, await in_thread(self._evaluation.record, name, measured))

    def _publish(self, measured: EvaluationResult, step: int, version: int) -> None:
        self._ungraded(measured.dead_letters)
        self._schedule.log(measured.metrics, step, version)
