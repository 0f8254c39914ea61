"""A whole pipeline of fakes in one process, behind the same Protocols as the Ray proxies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from async_opd.core.samples import Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.grading.evaluation import Evaluation
from async_opd.media.cache import MediaCache
from async_opd.pipeline import Pipeline
from async_opd.queue.message_queue import MessageQueue
from rollouter.stage import RollouterStage
from teachers.stage import ScorerStage
from tests.world.clock import Pace, PacedReads
from tests.world.config import run_config
from tests.world.log import FakeLog
from tests.world.payloads import Nodes, StoringTeacher
from tests.world.prompts import IMAGE_BYTES, TEACHERS, FakePrompts
from tests.world.queue import MortalQueue, message_queue
from tests.world.students import FakeStudent
from tests.world.sync import FakeSync
from tests.world.teachers import FakeTeacher
from tests.world.trainer import FakeTrainer
from trainer.batcher import Batcher


@dataclass
class World:
    """Everything a run on fakes consists of."""

    pipeline: Pipeline
    students: list[FakeStudent]
    teachers: dict[str, FakeTeacher]
    trainer: FakeTrainer
    sync: FakeSync
    queue: MortalQueue
    log: FakeLog
    rollouter: RollouterStage
    scorer: ScorerStage
    pace: Pace

    @property
    def counts(self) -> dict[str, int]:
        """Of the run's ledger."""
        return self.pipeline.run_state.ledger.counts

    async def run(self, seconds: float = 20) -> World:
        """To its end."""
        await asyncio.wait_for(self.pipeline.run(), seconds)
        return self

    def rewire(self, **parts: Any) -> None:
        """Other parts of the pipeline."""
        for name, part in parts.items():
            setattr(self.pipeline, name, part)
        self.pipeline.__post_init__()


def world(
    seed: int = 0,
    *,
    steps: int = 6,
    batch_size: int = 4,
    n: int = 2,
    s: float = 0.5,
    k: int = 2,
    replicas: int = 2,
    stall_s: float = 30.0,
    evaluation: Evaluation | None = None,
    max_lag: int | None = None,
    groups: bool = False,
    pace: Pace | None = None,
    guardrail: dict[str, Any] | None = None,
    share: float = 0.01,
    life_s: float = 60.0,
    before: bool = True,
    payloads: bool = True,
    stored: bool = False,
    trainer_of: Callable[[Batcher, Pace], FakeTrainer] = FakeTrainer,
) -> World:
    """``payloads`` False: the trainer leases headers, as the first of several ranks does.

    ``stored``: payloads of samples stay on their teachers' nodes.
    """
    config = run_config(
        teachers={name: {"model": name, "max_dead_letter_share": share} for name in TEACHERS},
        rollout={"n": n},
        train={"steps": steps, "batch_size": batch_size},
        eval={"every": 1, "teachers": False, "before": before},
        timeouts={"stall_s": stall_s},
        supervision={"timeout_s": life_s},
        guardrail=guardrail or {},
        log={"pools_every_s": 0},
        reward={} if groups else None,
        **{"async": {"staleness_threshold": s, "sync_steps": k}},
    )
    pace, stores = pace or Pace(seed), Nodes()

    def queue_of() -> MessageQueue:
        stores.close()  # those of the queue before end with it
        return message_queue(stores=stores)

    queue = MortalQueue(queue_of)
    mortal: Any = queue
    students = [FakeStudent(f"student/{i}", queue, n, pace) for i in range(replicas)]
    teachers = {
        name: FakeTeacher(
            f"teacher {name}/0", pace=pace, media=MediaCache(mortal.media, IMAGE_BYTES)
        )
        for name in TEACHERS
    }
    batcher = Batcher(
        mortal,
        batch_size=batch_size,
        max_version_lag=max_lag,
        group_size=n if groups else 1,
        payloads=payloads,
    )
    trainer, log, parts = trainer_of(batcher, pace), FakeLog(), Parts()
    parts.queue, parts.trainer = mortal, trainer
    parts.sync = sync = FakeSync(trainer, students, pace)
    of_students: Any = {student.name: student for student in students}
    parts.rollouter = rollouter = RollouterStage(of_students, mortal)
    of_teachers: Any = {
        name: [StoringTeacher(teacher, mortal, name) if stored else teacher]
        for name, teacher in teachers.items()
    }
    parts.scorer = scorer = ScorerStage(of_teachers, mortal, dict.fromkeys(TEACHERS, 8))
    reads: Any = PacedReads(pace)
    pipeline = Pipeline(config, parts, FakePrompts(), evaluation, log, reading=reads)
    return World(pipeline, students, teachers, trainer, sync, queue, log, rollouter, scorer, pace)


class Parts:
    """The stages of a run: supervision issues everything again when the queue has died."""

    queue: Any
    rollouter: Any
    scorer: Any
    trainer: Any
    sync: Any

    async def supervise(
        self, reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        while True:
            await self.queue.reissue.wait()
            self.queue.reissue.clear()
            await reissue()


shapes = {
    "seed": st.integers(0, 10**6),
    "s": st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.5]),
    "k": st.integers(1, 3),
    "n": st.sampled_from([1, 2, 4]),
    "replicas": st.integers(1, 3),
    "steps": st.integers(1, 7),
    "payloads": st.booleans(),
    "stored": st.booleans(),
}
"""Sizes of a run for property tests."""


def shapes_without(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Sizes of a run but for some."""
    return st.fixed_dictionaries({k: v for k, v in shapes.items() if k not in names})


def finished(**shape: Any) -> World:
    """A world whose run has ended."""

    async def run() -> World:
        return await world(**shape).run()

    return asyncio.run(run())


def assert_each_trained_once(made: World, steps: int) -> None:
    counts = Counter(uid for uid, _ in made.trainer.trained)
    assert len(counts) == steps * made.pipeline.config.train.batch_size
    assert set(counts.values()) == {1}


async def right(rollout: Rollout) -> float:
    """A grader: every answer is right."""
    return 1.0


def evaluation(
    grade: Callable[[Rollout], Awaitable[float]] = right, prompts: int = 4
) -> Evaluation:
    """Of the first prompts, one greedy answer each."""
    sampling = SamplingSpec(4, 0.0, 1.0, 1)
    return Evaluation(FakePrompts().prompts(prompts), sampling, grade)


def evaluated_world(grade: Callable[[Rollout], Awaitable[float]] = right) -> World:
    """One replica, and an evaluation every second of eight steps."""
    return world(steps=8, k=2, s=2.0, replicas=1, evaluation=evaluation(grade))
