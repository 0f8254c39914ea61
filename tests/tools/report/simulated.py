"""Run directories of the real pipeline in virtual time, with engines that only wait.

Each pool's speed, the sync's, the lengths and the grader's seconds are what a test sets them to.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from async_opd.accounting.journal import LEDGER, Journal
from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.core.batch import Batch
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import PROMPTS, StageReport, StepReport, topics
from async_opd.files.run_format import write_run_format
from async_opd.observability.activity import Activity
from async_opd.observability.metering import Metering
from async_opd.observability.run_log import RunLog
from async_opd.observability.trace import TraceSink
from async_opd.observability.trace_events import GRADE
from async_opd.pipeline import Pipeline
from async_opd.queue.message_queue import MessageQueue
from async_opd.tools.plan.setting import Setting, TeacherPoolSpec
from async_opd.weight_sync.coordinator import BroadcastSync
from benchmarks.simulated.replicas import SimulatedStudent, SimulatedTeacher
from rollouter.stage import RollouterStage
from teachers.stage import ScorerStage
from tests.tools.plan import virtual
from trainer.batcher import Batcher
from trainer.batches.batch_metrics import batch_metrics

EPOCH = 1_790_000_000.0


@dataclass
class Grader:
    """Grades ``processes`` rollouts at the same time, each in ``seconds``."""

    seconds: float
    processes: int

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.processes)

    async def grade(self, rollout: Rollout) -> Rollout:
        async with self._free:
            await asyncio.sleep(self.seconds)
        return replace(rollout, reward=1.0)


class Student(SimulatedStudent):
    """Reports what ``rollouter.replica.StudentReplica`` reports."""

    def watch(self, clock: Any, limit: int, grader: Grader | None) -> None:
        self._clock, self._limit = clock, limit
        self._activity = Activity("generate", clock, self.consumer)
        self._counts: Counter[str] = Counter()
        self._paused_s = self._pausing = 0.0
        if grader is not None:
            self._worker._grade = self._activity.followed(GRADE, grader.grade)

    async def _roll(self, prompt: Prompt, uid: str) -> Rollout:
        begun = self._clock() - self._paused_s
        rollout = await super()._roll(prompt, uid)
        self._counts["request_s"] += self._clock() - self._paused_s - begun
        return rollout

    async def pause(self, on_sync: str) -> None:
        self._pausing = self._clock()
        await super().pause(on_sync)

    async def resume(self) -> None:
        await super().resume()
        self._paused_s += self._clock() - self._pausing
        self._counts["paused_s"] += self._clock() - self._pausing

    async def report(self) -> StageReport:
        found = await super().report()
        counters = {"request_s": 0.0, "paused_s": 0.0, **self._counts, **found.counters}
        counters["rollouts"] = float(self._worker.rollouts)
        self._counts.clear()
        self._worker.rollouts = 0
        gauges = {
            **found.gauges,
            "limit": float(self._limit),
            "grading": float(self._worker.grading),
        }
        return replace(found, counters=counters, gauges=gauges)


class Teacher(SimulatedTeacher):
    """Counts samples, batches and a gap, which closes, as ``teachers.meter.ScoringMeter`` does."""

    samples = batches = scored = 0

    async def score(self, batch: Batch) -> Batch:
        scored = await super().score(batch)
        self.samples += len(batch.headers)
        self.batches += 1
        return scored

    async def report(self) -> StageReport:
        found = await super().report()
        self.scored += self.samples
        counted = {"samples": float(self.samples), "batches": float(self.batches)}
        tokens = found.counters["tokens"]
        counted |= {"gap": -2 * tokens / (1 + self.scored / 100), "gap_tokens": tokens}
        self.samples = self.batches = 0
        return replace(found, counters={**found.counters, **counted})


class Trainer(virtual.Trainer):
    """Reports what ``trainer.stage.TrainerStage`` reports of its time and of the lengths."""

    activity: Activity

    async def step(self) -> StepReport:
        clock = asyncio.get_running_loop().time
        begun = clock()
        taken = await self._batcher.take(self._version)
        waited = clock() - begun
        staleness = tuple(header.staleness(self._version) for header in taken.headers)
        tokens = sum(h.tokens for h in taken.headers)
        started = clock()
        with self.activity.busy() as since:
            await asyncio.sleep(self._speed.seconds(tokens))
            computed = self.activity.since(since)
        await self._batcher.done()
        self.ends.append(clock())
        metrics = {
            "train/wait_s": waited,
            "train/compute_s": clock() - started,
            **batch_metrics(taken.headers, 1 << 30),
            "train/repetition": 0.0,  # simulated engines sample one token
            "loss/distillation": 1.0 / len(self.ends),
        }
        step, requeued = len(self.ends), taken.requeued
        return StepReport(step, taken.headers, staleness, metrics, requeued, computed=computed)

    async def report(self) -> StageReport:
        return StageReport(busy=self.activity.drain(), spans=self._batcher.arrivals())


class Prompts(virtual.Prompts):
    """A source that needs no replay."""


def config_of(setting: Setting, changes: Mapping[str, Any]) -> RunConfig:
    """The config that a run with this setting has."""
    pool = setting.rollout
    tree: dict[str, Any] = {
        "student": {"model": "student"},
        "teachers": {
            one.name: {
                "model": one.name,
                "replicas": one.replicas,
                "engine": {"max_num_seqs": one.batch},
            }
            for one in setting.teachers
        },
        "data": {"train": "prompts.jsonl"},
        "rollout": {
            "n": pool.n,
            "replicas": pool.replicas,
            "max_tokens": setting.lengths.most,
            "concurrency": pool.slots,
            "engine": {"max_num_seqs": pool.slots},
        },
        "train": {
            "steps": setting.steps,
            "batch_size": setting.batch_size,
            "ranks": setting.ranks,
        },
        "async": {
            "staleness_threshold": setting.staleness_threshold,
            "sync_steps": setting.sync_steps,
        },
        "timeouts": {"stall_s": 1e9},
        "queue": {"max_samples": setting.queue_samples},
        "log": {"wandb": "off", "console": "off"},
        **changes,
    }
    return RunConfig.model_validate(tree)


def record(
    folder: Path, setting: Setting, seed: int = 0, grader: tuple[float, int] | None = None
) -> Path:
    """Runs the setting and leaves its run directory. ``grader``: (seconds, processes a replica)."""
    changes = {"reward": {"grader": "exact"}, "loss": {"kind": "forward_kl"}} if grader else {}
    config = config_of(setting, changes)
    folder.mkdir(parents=True)
    write_run_format(folder)
    (folder / "config.yaml").write_text(dump_config(config))
    virtual.run_virtually(_run(folder, config, setting, seed, grader))
    return folder


async def _run(
    folder: Path, config: RunConfig, setting: Setting, seed: int, grader: tuple[float, int] | None
) -> None:
    loop = asyncio.get_running_loop()

    def clock() -> float:
        return EPOCH + loop.time()

    sinks: Any = [TraceSink(folder, clock)]
    with RunLog(config, folder, clock, sinks) as log, Journal(folder / LEDGER) as journal:
        pipeline = _pipeline(config, setting, seed, grader, clock, log, journal)
        log.message("starting Ray and the engines")
        await pipeline.run()
        log.finish("completed")


def _pipeline(
    config: RunConfig,
    setting: Setting,
    seed: int,
    grading: tuple[float, int] | None,
    clock: Any,
    log: RunLog,
    journal: Journal,
) -> Pipeline:
    names = tuple(teacher.name for teacher in setting.teachers)
    queue = MessageQueue(topics(names), setting.queue_samples, 1 << 40, 1e9, kept=(PROMPTS,))
    batcher = Batcher(queue, batch_size=setting.batch_size, max_version_lag=setting.max_version_lag)
    trainer = Trainer(batcher, setting.train)
    trainer.activity = Activity("train", clock)
    students = _students(setting, queue, seed, clock, grading)
    rollouter = RollouterStage(students, queue)
    sync: Any = BroadcastSync(
        trainer,  # type: ignore[arg-type]
        rollouter.members,
        [1] * len(students),
        on_sync="keep",
        timeout_s=1e9,
        rolling=setting.rolling,
        clock=clock,
    )
    teachers: dict[str, list[Any]] = {}
    for one in setting.teachers:
        teachers[one.name] = [_teacher(one, clock) for _ in range(one.replicas)]
    scorer = ScorerStage(teachers, queue, {t.name: t.batch for t in setting.teachers})
    scorer._leases.clock = batcher._leases.clock = clock
    parts: Any = SimpleNamespace(
        queue=queue,
        rollouter=rollouter,
        scorer=scorer,
        trainer=trainer,
        sync=sync,
        supervise=virtual._nothing_dies,
    )
    prompts: Any = Prompts(names, round(setting.prompt_tokens), Random(seed))
    reads: Any = virtual.AtOnce()
    pipeline = Pipeline(config, parts, prompts, None, log, journal, reading=reads)
    pipeline.metering = Metering(clock=clock)
    return pipeline


def _students(
    setting: Setting, queue: MessageQueue, seed: int, clock: Any, grading: Any
) -> dict[str, Student]:
    pool = setting.rollout
    made = {}
    for index in range(pool.replicas):
        name = f"student/{seed}/{index}"
        spec: Any = SimpleNamespace(name=name, consumer=name, sampling=SimpleNamespace(n=pool.n))
        made[name] = Student(
            spec, queue, pool.speed, pool.slots, setting.lengths, setting.train.sync_s
        )
        made[name].watch(clock, pool.slots, grading and Grader(*grading))
    return made


def _teacher(pool: TeacherPoolSpec, clock: Any) -> Any:
    spec: Any = SimpleNamespace(name=pool.name)
    teacher = Teacher(spec, pool.speed, 0)
    teacher._activity = Activity("score", clock, pool.name)
    return teacher
