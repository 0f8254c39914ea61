"""The real pipeline, queue, stages and admission in virtual time, with engines that only wait.

It runs on ``tests.world.clock.VirtualLoop``. Each pool's speed, the sync's, the lengths and the
grader's seconds are what a test sets them to.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from async_opd.accounting.journal import Journal
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import TrainPlan
from async_opd.core.batch import Batch
from async_opd.core.reports import GRADE, StageReport, StepReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import PROMPTS, topics
from async_opd.observability.activity import Activity
from async_opd.observability.metering import Metering
from async_opd.pipeline import Pipeline
from async_opd.queue.message_queue import MessageQueue
from async_opd.tools.plan.setting import Setting, TeacherPoolSpec
from async_opd.weight_sync.coordinator import BroadcastSync
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from benchmarks.simulated.replicas import SimulatedStudent, SimulatedTeacher
from rollouter.stage import RollouterStage
from teachers.stage import ScorerStage
from tests.world.log import FakeLog
from trainer.batcher import Batcher
from trainer.batches.batch_metrics import batch_metrics

Clock = Callable[[], float]


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


class Trainer:
    """The real batcher; a step and a snapshot only take time, which it reports as a real one."""

    def __init__(self, batcher: Batcher, speed: TrainPlan, clock: Clock) -> None:
        self.ends: list[float] = []
        self.staleness: list[tuple[int, ...]] = []
        self._batcher, self._speed, self._version = batcher, speed, 0
        self._activity = Activity("train", clock)

    async def step(self) -> StepReport:
        clock = asyncio.get_running_loop().time
        begun = clock()
        taken = await self._batcher.take(self._version)
        started = clock()
        staleness = tuple(header.staleness(self._version) for header in taken.headers)
        with self._activity.busy() as since:
            await asyncio.sleep(self._speed.seconds(sum(h.tokens for h in taken.headers)))
            computed = self._activity.since(since)
        await self._batcher.done()
        self.ends.append(clock())
        self.staleness.append(staleness)
        metrics = {
            "train/wait_s": started - begun,
            "train/compute_s": clock() - started,
            **batch_metrics(taken.headers, 1 << 30),
            "train/repetition": 0.0,  # simulated engines sample one token
            "loss/distillation": 1.0 / len(self.ends),
        }
        step, requeued = len(self.ends), taken.requeued
        return StepReport(step, taken.headers, staleness, metrics, requeued, computed=computed)

    async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
        await asyncio.sleep(self._speed.snapshot_s)
        self._version = version
        return WeightMeta((), (), (), ())

    async def open(self, group: int, world_size: int, connected: Any) -> Rendezvous:
        return Rendezvous("127.0.0.1", 0, world_size, 1.0, 1, b"")

    async def connect(self, group: int) -> None: ...
    async def send(self, group: int) -> float:
        return 0.0

    async def report(self) -> StageReport:
        return StageReport(busy=self._activity.drain(), spans=self._batcher.arrivals())


@dataclass
class Prompts:
    """A shuffled source: teachers come as they come."""

    names: tuple[str, ...]
    tokens: int
    random: random.Random
    taken: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def next(self, count: int) -> list[Prompt]:
        ids = np.zeros(self.tokens, dtype=np.int32)
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        names = self.names
        return [Prompt(f"p{i}", "", self.random.choice(names), ids) for i in numbers]


class AtOnce:
    """Reads by no thread, for which virtual time would not wait."""

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


@dataclass(frozen=True)
class Seen:
    """What the pipeline did after the warm-up."""

    samples_per_s: float
    mean_staleness: float


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
        "train": {"steps": setting.steps, "batch_size": setting.batch_size, "ranks": setting.ranks},
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


async def run_pipeline(setting: Setting, run: int = 0) -> Seen:
    """The setting on the real pipeline; ``run`` draws other lengths."""
    log: Any = FakeLog()
    clock = asyncio.get_running_loop().time
    trainer, pipeline = build(config_of(setting, {}), setting, run, clock, log)
    await pipeline.run()
    warm, ends = setting.warmup_steps, trainer.ends
    late = [value for staleness in trainer.staleness[warm:] for value in staleness]
    rate = len(late) / (ends[-1] - ends[warm - 1])
    return Seen(rate, sum(late) / len(late))


def build(
    config: RunConfig,
    setting: Setting,
    seed: int,
    clock: Clock,
    log: Any,
    journal: Journal | None = None,
    grading: tuple[float, int] | None = None,
    make_students: Callable[[MessageQueue], dict[str, Any]] | None = None,
) -> tuple[Trainer, Pipeline]:
    """The trainer and the pipeline. ``grading``: (seconds, processes a replica)."""
    names = tuple(teacher.name for teacher in setting.teachers)
    queue = MessageQueue(topics(names), setting.queue_samples, 1 << 40, 1e9, kept=(PROMPTS,))
    batcher = Batcher(queue, batch_size=setting.batch_size, max_version_lag=setting.max_version_lag)
    trainer = Trainer(batcher, setting.train, clock)
    if make_students is None:
        students: dict[str, Any] = {**_students(setting, queue, seed, clock, grading)}
    else:
        students = make_students(queue)
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
        supervise=_nothing_dies,
    )
    prompts = Prompts(names, round(setting.prompt_tokens), random.Random(seed))
    reads: Any = AtOnce()
    pipeline = Pipeline(config, parts, prompts, None, log, journal, reading=reads)
    pipeline.metering = Metering(clock=clock)
    return trainer, pipeline


async def _nothing_dies(*_: Any) -> None:
    await asyncio.Event().wait()


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
