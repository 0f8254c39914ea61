"""One run from start to end: run directory, cluster, training, model, summary, exit code.

completed → 0        failed → 1        SIGINT or SIGTERM → checkpoint, model, interrupted → 130

With ``resume`` the run continues after the newest complete checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from async_opd.checkpoint.earlier_run import (
    is_completed,
    refuse_another,
    refuse_begun_in_other_format,
    refuse_mirrored,
    take_mirrored,
)
from async_opd.checkpoint.resume import identity
from async_opd.cluster.launch import LaunchedStages, launch
from async_opd.cluster.watching import RECONNECT, left_s
from async_opd.core.errors import (
    AsyncOPDError,
    ConfigError,
    GuardrailExceeded,
    HeadLost,
    ProcessDied,
    StageError,
    first_cause,
)
from async_opd.core.printable import on_one_line
from async_opd.core.stages import TRAINER
from async_opd.files.run_format import write_run_format
from async_opd.files.safe_open import private_files
from async_opd.job import Job, describe, opened
from async_opd.models.tokenizer import Text
from async_opd.observability.live.console import resume_command
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Sink, Status
from async_opd.prepare import Prepared
from async_opd.processes.run_lock import run_lock
from async_opd.processes.signals import SignalHandler
from async_opd.training import Training
from async_opd.waiting.own_loop import run_to_end

COMPLETED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run(ready: Prepared, resume: bool = False, viewers: Sequence[Sink] = ()) -> int:
    """Runs to the end, from the beginning or from the newest checkpoint; returns the exit code.

    ``viewers`` are shown the run besides those of the config.
    """
    config, inputs = ready.config, ready.inputs
    name = config.run_dir or f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(name).absolute()
    config = config.model_copy(update={"run_dir": name})
    mirror = config.checkpoint.mirror
    taken: list[str] = []
    if resume:
        refuse_begun_in_other_format(run_dir)
    if mirror is not None and resume:
        with private_files(), run_lock(run_dir):
            write_run_format(run_dir)
            taken = take_mirrored(mirror, run_dir, identity(config, inputs.checked))
    elif mirror is not None:
        refuse_mirrored(mirror)
    if resume and is_completed(run_dir):
        refuse_another(run_dir, identity(config, inputs.checked))
        if taken or not (run_dir / "config.yaml").exists():
            # a completed run comes without the files that each run writes itself
            with private_files(), run_lock(run_dir):
                describe(run_dir, config, inputs)
        print(on_one_line(f"{run_dir} is completed already"))
        return COMPLETED
    ready = replace(ready, config=config)
    with private_files(), run_lock(run_dir), opened(ready, run_dir, resume, viewers, taken) as job:
        return run_to_end(_run(job), uvloop.new_event_loop)


@dataclass
class _Outcome:
    """How a run has ended. ``error`` is its first failure, which outranks a later signal."""

    log: RunLog
    run_dir: Path
    error: Exception | None = None

    def finish(self, error: BaseException) -> int:
        """The exit code, after the log is finished."""
        status, words, code = _exit_status(self.error or error, self.run_dir)
        self.log.finish(status, words)
        return code

    def give_up(self, why: str) -> int:
        """The exit code of a process that is ended: see SignalHandler."""
        cause = self.error or asyncio.CancelledError(why)
        status, words, code = _exit_status(cause, self.run_dir)
        self.log.give_up(status, f"{words}; {why}" if self.error else words)
        return code


def _exit_status(error: BaseException, run_dir: Path) -> tuple[Status, str, int]:
    """Status, words and exit code of a run that an error or a signal has ended."""
    if isinstance(error, asyncio.CancelledError):
        words = str(error) or "a signal ended the run"
        remedy = f"continue it: {resume_command(run_dir)}"
        return "interrupted", f"{words}\n    → {remedy}", INTERRUPTED
    if isinstance(error, AsyncOPDError):
        return "failed", str(error), BAD_INPUT if isinstance(error, ConfigError) else FAILED
    cause = first_cause(error)
    return "failed", f"{type(cause).__name__}: {cause}", FAILED


async def _run(job: Job) -> int:
    log, outcome = job.log, _Outcome(job.log, job.run_dir)
    work = asyncio.create_task(_distil(job, outcome))
    signals = SignalHandler(work, job.config.shutdown.grace_s, outcome.give_up, log.message)
    try:
        await signals.work_ended()
    except (asyncio.CancelledError, Exception) as error:
        code = outcome.finish(error)
        if isinstance(error, HeadLost):
            _leave(code)
        return code
    finally:
        signals.over()
    return COMPLETED if log.finish("completed") == "completed" else FAILED


def _leave(code: int) -> None:
    """Ends this process, which Ray ends in seconds; threads of both wait for the lost head."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _distil(job: Job, outcome: _Outcome) -> None:
    """Launches the cluster, runs the pipeline, and saves the student however the run ends."""
    config, log = job.config, job.log
    text = Text.of(config)
    started = time.time()
    log.message("starting Ray and the engines")
    ends, device = text.response_ends(), job.ready.device
    starting = launch(config, device=device, eos_ids=ends, notify=log.message, waits=job.waits)
    async with starting as stages:
        log.summarize({"perf/start_s": time.time() - started})
        log.message(f"everything is up after {time.time() - started:.0f} s")
        training = await Training.begin(job, stages, text)
        began = time.time()
        try:
            await training.run()
        except asyncio.CancelledError:
            grace_s = config.shutdown.grace_s
            await training.checkpoint_at_end(grace_s, "shutdown.grace_s")
            if training.pipeline.has_weights:
                await _save_partial_model(stages, job, training.pipeline.state_s)
            else:
                log.message("the student is not saved: the trainer has not its weights again yet")
            raise
        except Exception as error:
            outcome.error = error
            await _checkpoint_after_failure(error, training, job)
            lost = isinstance(error, HeadLost)  # no time is left for more than the checkpoint
            if training.pipeline.is_trained and training.pipeline.has_weights and not lost:
                await _save_partial_model(stages, job, training.pipeline.state_s)
            raise
        finally:
            log.summarize({"perf/run_s": time.time() - began})
        bound_s = training.pipeline.state_s
        await _shielded(stages.watched(_save(stages, job, bound_s)))
        if config.checkpoint.keep_best is not None:
            await _shielded(stages.watched(_save_best(stages, job, bound_s)))


async def _checkpoint_after_failure(error: Exception, training: Training, job: Job) -> None:
    """Writes a checkpoint of a run that has failed, within the bound of any other one.

    Without the head of its cluster it has the time that Ray leaves it, and after a signal
    ``shutdown.grace_s``; the run ends as failed, not as interrupted.
    """
    cause, config = first_cause(error), job.config
    if isinstance(cause, ProcessDied) and cause.stage == TRAINER:
        job.message("no checkpoint at the end, --resume takes the one before: the trainer died")
        return
    job.message(f"the run has failed: {str(cause) or type(cause).__name__}")
    if isinstance(cause, GuardrailExceeded):
        job.message("no checkpoint of weights beyond the guardrail: --resume takes the one before")
        return
    bound = training.pipeline.state_s, "checkpoint.timeout_s"
    if isinstance(cause, HeadLost):
        bound = min(bound, (left_s(), RECONNECT))
    keeping = asyncio.create_task(training.checkpoint_at_end(*bound))
    try:
        await asyncio.shield(keeping)
    except asyncio.CancelledError:
        grace_s = config.shutdown.grace_s
        await asyncio.wait({keeping}, timeout=grace_s)
        if keeping.cancel():
            job.message(f"no checkpoint at the end: not written {grace_s:g} s after the signal")
        if (task := asyncio.current_task()) is not None:
            task.uncancel()


async def _save_partial_model(stages: LaunchedStages, job: Job, bound_s: float) -> None:
    try:
        with job.waits.on("the student to be saved", bound_s):
            await stages.save_early(str(job.run_dir / "model"))
    except StageError as error:
        job.message(f"the student of the failed run could not be saved: {error}")
    else:
        job.message(f"the student is in {job.run_dir / 'model'}")


async def _shielded(work: Coroutine[Any, Any, None]) -> None:
    """Awaits the work; a signal takes effect after the work is done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _save(stages: LaunchedStages, job: Job, bound_s: float) -> None:
    with job.waits.on("the student to be saved", bound_s):
        await stages.trainer.save(str(job.run_dir / "model"))
    job.message(f"the student is in {job.run_dir / 'model'}")


async def _save_best(stages: LaunchedStages, job: Job, bound_s: float) -> None:
    """Writes the student of the checkpoint with the best evaluation to ``best/``.

    The trainer has these weights afterwards. StageError for a damaged checkpoint.
    """
    store, metric = job.store, job.config.checkpoint.keep_best
    step = await asyncio.to_thread(store.best)
    if step is None:
        job.message(f"no checkpoint was evaluated: there is no best one by {metric}")
        return
    if step != job.config.train.steps:
        with job.waits.on("the best checkpoint to be loaded", bound_s):
            checkpoint = await asyncio.to_thread(store.load, step)
            await stages.trainer.restore(str(checkpoint.folder))
    with job.waits.on("the best student to be saved", bound_s):
        await stages.trainer.save(str(job.run_dir / "best"))
    values = await asyncio.to_thread(store.evaluated.values)
    value, top = values[step], max(values, key=lambda at: values[at])
    if values[top] > value:
        job.message(f"step {top} has no checkpoint, though its {metric} is {values[top]:.4g}")
    job.log.summarize({"checkpoint/best_step": float(step), "checkpoint/best": value})
    job.message(f"the best student by {metric} ({value:.4g} at step {step}) is in best/")
