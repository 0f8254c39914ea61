"""The training of a run: a pipeline, and another one each time the run is rewound.

Job, LaunchedStages ──► Pipeline ──run──► every step is trained
                    ▲                │ the trainer died, or the guardrail's limits are exceeded
                    └── rewind ◄─────┘ to a checkpoint; the engines stay
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from async_opd.accounting.journal import LEDGER
from async_opd.accounting.lineage import RollBack, add_roll_back, begun_after, read_roll_backs
from async_opd.checkpoint.checkpointer import Checkpointer, state_s
from async_opd.checkpoint.recovery import Recovery
from async_opd.checkpoint.resume import cut_files, evaluated_steps, identity
from async_opd.checkpoint.store import Checkpoint
from async_opd.cluster.launch import LaunchedStages
from async_opd.core.errors import GuardrailExceeded, ProcessDied, StageError
from async_opd.core.stages import TRAINER
from async_opd.data.teacher_prompts import teacher_readers
from async_opd.grading.evaluation_files import EVALS
from async_opd.grading.evaluation_set import evaluation_of
from async_opd.job import Job
from async_opd.models.model_files import is_vision_model
from async_opd.models.tokenizer import Text
from async_opd.pictures import MEDIA, RecordedPrompts, Thumbnails
from async_opd.pipeline import Pipeline
from async_opd.run_prompts import cold_start_of, reading_of, training_prompts
from async_opd.waiting.deadline import Bound, Deadline, in_thread
from async_opd.waiting.reading_thread import ReadingThread

THUMBNAILS_S = 5.0
"""Seconds that the end of the training waits for thumbnails that are being written."""


@dataclass
class Training:
    """Runs pipelines until all steps are trained: the next one begins at the newest checkpoint."""

    job: Job
    stages: LaunchedStages
    text: Text
    reading: ReadingThread
    """Reads the prompts of all pipelines: each one waits for the reads of the one before."""

    def __post_init__(self) -> None:
        """Makes the first pipeline; see ``_pipeline``."""
        job = self.job
        self._waits = job.waits
        folder = job.run_dir / EVALS
        most = int(job.config.log.thumbnails_mib * (1 << 20))
        self._thumbnails = Thumbnails(job.run_dir / MEDIA, most)
        self._readers = teacher_readers(job.config, self.text)
        rows, config = job.inputs.eval, job.config
        self._evaluation = evaluation_of(
            config,
            rows,
            self.text,
            folder,
            self._readers,
            job.inputs.max_eval_prompt_tokens,
            self._thumbnails,
        )
        self._checkpointer = _checkpointer(self.job, self.stages)
        self._checkpointer.lineage = job.store.lineage()
        warn = partial(job.log.message, level="warning")
        self._recovery = Recovery(self._checkpointer, self.stages, warn)
        self._notes: list[str] = []  # of a pipeline that a thread has made
        self._begin_after(job.start.cut.step if job.start else 0)
        self.pipeline = self._pipeline()

    @classmethod
    async def begin(cls, job: Job, stages: LaunchedStages, text: Text) -> Training:
        """The training of a job, whose first prompts are read in a thread."""
        reading = reading_of(job)
        return await reading.run(lambda: cls(job, stages, text, reading))

    async def run(self) -> None:
        """Returns when every step is trained. Raises the first error that no rewind mends."""
        try:
            while not await self._run_until_rewound():
                pass
        finally:
            self._thumbnails.close(THUMBNAILS_S)
            if self._evaluation is not None:
                self._evaluation.close()

    async def checkpoint_at_end(self, bound_s: float, key: str) -> None:
        """Logs the last rows of a run that ends early, and writes its checkpoint.

        The latter if its trainer still answers; it takes at most ``bound_s``, which ``key`` sets: a
        config key, or a setting of Ray.
        """
        try:
            self.pipeline.log_rows()
            if not self.job.config.checkpoint.on_exit:
                return
            with self.job.waits.on("the last checkpoint", bound_s):
                async with asyncio.timeout(bound_s):
                    await self._check_trainer_alive()
                    await self.pipeline.checkpoint()
        except Exception as error:  # of any kind: the model has to be saved next
            cause = str(error) or f"not written within {bound_s:g} s ({key})"
            self.job.message(f"no checkpoint at the end, --resume takes the one before: {cause}")

    async def _check_trainer_alive(self) -> None:
        """StageTimeout if the trainer does not answer: it hangs, or has died and has no state."""
        bound_s = self.job.config.supervision.timeout_s
        answer = self.stages.trainer.report()
        await Deadline(TRAINER).within(bound_s, "a heartbeat answer", answer)

    async def _run_until_rewound(self) -> bool:
        """Whether all steps are trained; False if the run was rewound."""
        for note in self._notes:
            self.job.message(note)
        self._notes.clear()
        try:
            await self.pipeline.run()
        except ProcessDied as error:
            if error.stage != TRAINER:
                raise
            recovers = self.job.config.cluster.trainer_recovery == "replica"
            rewinding = self._rewind(error, self._recovery if recovers else None)
            await self.stages.watched(rewinding)
            return False
        except GuardrailExceeded as error:
            await self.stages.watched(self._roll_back(error))
            return False
        return True

    async def _roll_back(self, error: GuardrailExceeded) -> None:
        """Rewinds to before the window that exceeds a limit. Raises the error if it may not."""
        job, config = self.job, self.job.config.guardrail
        if config.mode != "roll_back" or len(read_roll_backs(job.run_dir)) >= config.max_roll_backs:
            raise error
        self.pipeline.rewound = True
        await self._settle()
        # first: a run that is killed in between goes back all the same, since its lineage marks
        # the checkpoints that it has left, here and at the mirror
        self._begin_after(job.store.before(error.step - config.window))
        one = RollBack(error.step, error.found, self._checkpointer.lineage)
        count = await asyncio.to_thread(add_roll_back, job.run_dir, one)
        job.message(f"rollback {count} of at most {config.max_roll_backs}")
        if job.mirror is not None:
            bound_s = job.config.supervision.timeout_s
            with self._waits.on("the mirror's note of the rollback", bound_s):
                warning = await asyncio.to_thread(job.mirror.roll_back, bound_s)
            if warning:
                job.log.message(warning, "warning")
        await asyncio.to_thread(job.store.roll_back, error.step - config.window)
        await self._rewind(error)

    def _begin_after(self, step: int) -> None:
        """Checkpoints are of another lineage from now on: later steps that exist are left."""
        self._checkpointer.lineage = begun_after(step, self._checkpointer.lineage)

    def _pipeline(self, again: bool = False) -> Pipeline:
        """The next pipeline, which has read what its first prompts need.

        Far into a streamed source that may take long: not for the driver's event loop. ``again``:
        the engines may have weights of any version. Those of a VLM student are compared with
        the trainer before anything is sampled, since images can be prepared in many ways; weights
        that are rounded by the sender are not those that the engines loaded.
        """
        job = self.job
        evaluated = evaluated_steps(job.run_dir)
        job.store.forget_evaluations(evaluated, self._notes.append)
        prompts = RecordedPrompts(
            training_prompts(job, self.text, self._readers),
            self._thumbnails,
            seed=job.config.seed,
            share=job.config.log.microscope.share,
            n=job.config.rollout.n,
            notify=job.log.message,
        )
        student = job.config.student.model
        made = Pipeline(
            job.config,
            self.stages,
            prompts,
            self._evaluation,
            job.log,
            job.journal,
            self._checkpointer,
            job.start,
            again
            or job.config.sync.fake_quantization is not None
            or (job.config.sync.verify_every > 0 and is_vision_model(student)),
            max(evaluated, default=-1),
            cold_start_of(job, self.text, self.reading),
            self._lr_factor(),
            self._waits,
            self.reading,
        )
        prompts.read_ahead()
        return made

    def _lr_factor(self) -> float:
        """Of all learning rates, after the rollbacks so far; logged if it is not 1."""
        count = len(read_roll_backs(self.job.run_dir))
        factor = self.job.config.guardrail.roll_back_lr**count
        if count:
            words = f"learning rates are multiplied by {factor:g}: {count} rollbacks"
            self._notes.append(words)
        return float(factor)

    async def _settle(self) -> None:
        """Waits for the checkpoint that is being written, or gives it up."""
        bound = self.job.config.supervision.timeout_s
        try:
            async with Bound(bound):
                with self._waits.on("the checkpoint before", bound):
                    await self._checkpointer.settled()
        except TimeoutError:
            message = f"a checkpoint that was not written within {bound:g} s is abandoned"
            self.job.message(message)
            await self._checkpointer.abandon(bound)

    async def _newest(self) -> Checkpoint | None:
        notes: list[str] = []
        with self._waits.on("the newest checkpoint, which is compared with its manifest"):
            start = await asyncio.to_thread(self.job.store.newest, notes.append)
        for note in notes:
            self.job.message(note)
        return start

    async def _rewind(self, error: StageError, recovery: Recovery | None = None) -> None:
        """Takes everything but the engines back to the newest checkpoint, or to the start.

        Or to the weights of a replica, if these are newer.
        """
        job = self.job
        self.pipeline.rewound = True
        await self._settle()
        start = await self._newest()
        found, bound = None, self._checkpointer.timeout_s
        if recovery is not None:
            with self._waits.on("a replica's weights", bound, " a replica"):
                found = await recovery.fetch(start)
        self._checkpointer.noted.clear()  # versions are other weights from now on
        await self.stages.rewind(error)
        if recovery is not None and found is not None:
            try:
                with self._waits.on("the trainer to take a replica's weights", bound, " a part"):
                    start = await recovery.checkpoint(found, self._newest)
            except StageError as failed:  # a new trainer has the student's first weights again
                job.message(f"the run goes on without a replica's weights: {failed}")
                start = await self._newest()
                await self.stages.rewind(failed)
        cut = start.cut if start else None
        if cut is None or cut.lineage != self._checkpointer.lineage:
            self._begin_after(cut.step if cut else 0)
        job.log.rewind(await in_thread(cut_files, job.run_dir, cut))
        job.journal.rewind(cut.files.get(LEDGER, 0) if cut else 0)
        self.job = replace(job, start=start)
        self.pipeline = await self.reading.run(lambda: self._pipeline(again=True))
        job.message(
            f"the trainer is restarted; the run goes on after step {cut.step if cut else 0}"
        )


def _checkpointer(job: Job, stages: LaunchedStages) -> Checkpointer:
    made = Checkpointer(
        job.store,
        stages.trainer,
        config=identity(job.config, job.inputs.checked),
        timeout_s=state_s(job.config),
        keep_best=job.config.checkpoint.keep_best,
        notify=job.message,
        written=job.log.checkpoint,
        sizes=job.sizes,
        sync=job.sync,
    )
    if job.mirror is not None:
        job.mirror.count_in(made.metrics)
    return made
