"""The real pipeline, queue, stages and admission in virtual time, with engines that only wait.

The event loop's clock jumps to the next timer whenever nothing is left to do now, so that a run of
an hour takes seconds and does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import TrainPlan
from async_opd.core.reports import StageReport, StepReport
from async_opd.core.samples import Prompt
from async_opd.core.stages import PROMPTS, SamplingSpec, topics
from async_opd.pipeline import Pipeline
from async_opd.queue.message_queue import MessageQueue
from async_opd.tools.plan.setting import Setting
from async_opd.weight_sync.coordinator import BroadcastSync
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from benchmarks.simulated.replicas import SimulatedStudent, SimulatedTeacher
from rollouter.spec import StudentEngineSpec
from rollouter.stage import RollouterStage
from teachers.stage import ScorerStage
from trainer.batcher import Batcher


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only in timers; what would run in a thread runs at once."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__()

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        timers: Any = self._scheduled  # type: ignore[attr-defined]
        if not ready and timers:
            self._virtual = max(self._virtual, timers[0]._when)
        super()._run_once()  # type: ignore[misc]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs it to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Trainer:
    """The real batcher; a step and a snapshot only take time."""

    def __init__(self, batcher: Batcher, speed: TrainPlan) -> None:
        self.ends: list[float] = []
        self.staleness: list[tuple[int, ...]] = []
        self._batcher = batcher
        self._speed = speed
        self._version = 0

    async def step(self) -> StepReport:
        taken = await self._batcher.take(self._version)
        staleness = tuple(header.staleness(self._version) for header in taken.headers)
        await asyncio.sleep(self._speed.seconds(sum(h.tokens for h in taken.headers)))
        await self._batcher.done()
        self.ends.append(asyncio.get_running_loop().time())
        self.staleness.append(staleness)
        return StepReport(len(self.ends), taken.headers, staleness, {}, taken.requeued)

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
        return StageReport()


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


@dataclass
class Log:
    """Keeps nothing."""

    lines: list[Any] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)

    def log(self, step: int, metrics: Any) -> None: ...
    def summarize(self, metrics: Any) -> None: ...
    def waits(self, waits: Any) -> None: ...
    def busy(self, pools: Any) -> None: ...
    def message(self, text: str, level: str = "info") -> None: ...


@dataclass(frozen=True)
class Seen:
    """What the pipeline did after the warm-up."""

    samples_per_s: float
    mean_staleness: float


async def run_pipeline(setting: Setting, run: int = 0) -> Seen:
    """The setting on the real pipeline; ``run`` draws other lengths."""
    trainer, pipeline = _build(setting, run)
    task = asyncio.create_task(pipeline.run())
    await task
    warm, ends = setting.warmup_steps, trainer.ends
    late = [value for staleness in trainer.staleness[warm:] for value in staleness]
    rate = len(late) / (ends[-1] - ends[warm - 1])
    return Seen(rate, sum(late) / len(late))


def _build(setting: Setting, run: int) -> tuple[Trainer, Pipeline]:
    names = tuple(teacher.name for teacher in setting.teachers)
    queue = MessageQueue(topics(names), setting.queue_samples, 1 << 40, 1e9, kept=(PROMPTS,))
    batcher = Batcher(queue, batch_size=setting.batch_size, max_version_lag=setting.max_version_lag)
    trainer = Trainer(batcher, setting.train)
    students = _students(setting, queue, run)
    rollouter = RollouterStage(students, queue)
    sync: Any = BroadcastSync(
        trainer,  # type: ignore[arg-type]
        rollouter.members,
        [1] * len(students),
        on_sync="keep",
        timeout_s=1e9,
        rolling=setting.rolling,
    )
    scorer = ScorerStage(
        {t.name: [_teacher(t) for _ in range(t.replicas)] for t in setting.teachers},
        queue,
        {t.name: t.batch for t in setting.teachers},
    )
    parts: Any = SimpleNamespace(
        queue=queue,
        rollouter=rollouter,
        scorer=scorer,
        trainer=trainer,
        sync=sync,
        supervise=_nothing_dies,
    )
    prompts = Prompts(names, round(setting.prompt_tokens), random.Random(run))
    reads: Any = AtOnce()
    return trainer, Pipeline(_config(setting), parts, prompts, None, Log(), reading=reads)


async def _nothing_dies(*_: Any) -> None:
    await asyncio.Event().wait()


def _students(setting: Setting, queue: MessageQueue, run: int) -> dict[str, SimulatedStudent]:
    pool = setting.rollout
    sampling = SamplingSpec(setting.lengths.most, 1.0, 1.0, pool.n)
    specs = [
        StudentEngineSpec(f"student/{run}/{index}", {}, sampling, (), "gloo")
        for index in range(pool.replicas)
    ]
    return {
        spec.name: SimulatedStudent(
            spec, queue, pool.speed, pool.slots, setting.lengths, setting.train.sync_s
        )
        for spec in specs
    }


def _teacher(pool: Any) -> Any:
    spec: Any = SimpleNamespace(name=pool.name)
    return SimulatedTeacher(spec, pool.speed, 0)


def _config(setting: Setting) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {teacher.name: {"model": teacher.name} for teacher in setting.teachers},
            "data": {"train": "prompts.jsonl"},
            "rollout": {"n": setting.rollout.n},
            "train": {"steps": setting.steps, "batch_size": setting.batch_size},
            "async": {
                "staleness_threshold": setting.staleness_threshold,
                "sync_steps": setting.sync_steps,
            },
            "timeouts": {"stall_s": 1e9},
            "queue": {"max_samples": setting.queue_samples},
        }
    )
