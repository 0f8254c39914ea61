"""One run from start to end: run directory, cluster, pipeline, model, summary, exit code.

completed → 0        failed → 1        SIGINT or SIGTERM → saved, interrupted → 130
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import uvloop

from async_opd.cluster.launch import Stages, launch
from async_opd.core.config import RunConfig
from async_opd.core.devices import resolve_device
from async_opd.core.errors import AsyncOPDError, ConfigError, first_cause
from async_opd.core.evaluation import Evaluation
from async_opd.core.graders import load_grader
from async_opd.core.load import dump_config
from async_opd.core.preflight import Inputs
from async_opd.core.prompts import PromptStream, to_prompt
from async_opd.core.runlog import RunLog
from async_opd.core.samples import Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.core.text import Text, eos_ids
from async_opd.core.trace import Trace
from async_opd.pipeline import Pipeline

COMPLETED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run(config: RunConfig, inputs: Inputs) -> int:
    """Runs to the end; returns the exit code."""
    name = config.run_dir or f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(name).absolute()
    config = config.model_copy(update={"run_dir": name})
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    with RunLog(config, run_dir) as log:
        code: int = uvloop.run(_run(config, inputs, run_dir, log))
    return code


async def _run(config: RunConfig, inputs: Inputs, run_dir: Path, log: RunLog) -> int:
    work = asyncio.create_task(_distil(config, inputs, run_dir, log))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        log.finish("interrupted", "by a signal")
        return INTERRUPTED
    except ConfigError as error:
        log.finish("failed", str(error))
        return BAD_INPUT
    except AsyncOPDError as error:
        log.finish("failed", str(error))
        return FAILED
    except Exception as error:
        cause = first_cause(error)
        log.finish("failed", f"{type(cause).__name__}: {cause}")
        return FAILED
    return COMPLETED if log.finish("completed") == "completed" else FAILED


async def _distil(config: RunConfig, inputs: Inputs, run_dir: Path, log: RunLog) -> None:
    """Launches the cluster, runs the pipeline, saves the model however it ends."""
    text = Text(config.student.model, config.data.chat_template)
    prompts = PromptStream(
        inputs.train,
        [source.weight for source in config.data.train],
        text.encode,
        config.teacher_of,
        seed=config.seed,
        shuffle=config.data.shuffle,
        graded=config.reward is not None,
        limit=inputs.max_prompt_tokens,
        templates=config.prompt_templates,
    )
    started = time.time()
    log.message("starting Ray and the engines")
    ends = eos_ids(config.student.model)

    def lost(name: str, error: Exception) -> None:
        log.message(f"{name} left the rollout pool, the others go on with its prompts: {error}")

    device = resolve_device(config)
    async with launch(config, device=device, eos_ids=ends, on_lost=lost) as stages:
        log.summarize({"perf/start_s": time.time() - started})
        log.message(f"everything is up after {time.time() - started:.0f} s")
        pipeline = Pipeline(config, stages, prompts, _evaluation(config, inputs, text), log)
        training = time.time()
        try:
            await pipeline.run()
        except asyncio.CancelledError:
            await _save(stages, run_dir, log)
            raise
        finally:
            log.summarize({"perf/run_s": time.time() - training})
            _write_trace(pipeline, run_dir, training)
        await _save(stages, run_dir, log)


async def _save(stages: Stages, run_dir: Path, log: RunLog) -> None:
    await stages.trainer.save(str(run_dir / "model"))
    log.message(f"the student is in {run_dir / 'model'}")


def _write_trace(pipeline: Pipeline, run_dir: Path, start: float) -> None:
    trace = Trace(run_dir, start)
    for pool, intervals in pipeline.metering.intervals.items():
        trace.add(pool, intervals)
    trace.write()


def _evaluation(config: RunConfig, inputs: Inputs, text: Text) -> Evaluation | None:
    """The first ``eval.max_prompts`` rows of each data source, or nothing to evaluate."""
    taken: dict[str, int] = {}
    rows = {}
    prompts = []
    for row in inputs.eval:
        taken[row.data_source] = taken.get(row.data_source, 0) + 1
        if config.eval.max_prompts is None or taken[row.data_source] <= config.eval.max_prompts:
            prompt = to_prompt(
                row, text.encode, config.teacher_of, templates=config.prompt_templates
            )
            rows[prompt.uid] = row
            prompts.append(prompt)
    if not prompts:
        return None
    grader = load_grader(config.eval.grader)

    def grade(rollout: Rollout) -> float:
        return grader(text.decode(rollout.response_ids.tolist()), rows[rollout.prompt.uid])

    sampling = SamplingSpec(
        max_tokens=config.eval.max_tokens or config.rollout.max_tokens,
        temperature=config.eval.temperature,
        top_p=1.0,
        n=1,
    )
    return Evaluation(tuple(prompts), sampling, grade)
