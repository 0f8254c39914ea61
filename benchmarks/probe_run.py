"""A whole run in one process for ``benchmarks.probe``: pipeline, queue and learner are real.

    pipeline ──prompts──► Rollouts ──rollouts──► Scoring ──scored──► Training (batcher, learner)
                             ▲ weights ──────────── Sync ◄──────────────┘

Models compute with torch in the event loop's thread: one core is busy at any time, with one stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from async_opd.config.run_config import RunConfig
from async_opd.core.batch import Batch, unpack
from async_opd.core.reports import Events, Progress, StageReport, StepReport, SyncReport
from async_opd.core.samples import Group, Prompt
from async_opd.core.stages import PROMPTS, SCORED, SamplingSpec, rollouts_topic, topics
from async_opd.core.uid import Uid, rollout_uid
from async_opd.pipeline import Pipeline
from async_opd.queue.message_queue import MessageQueue
from benchmarks.probe_models import DIGITS, TorchModel
from trainer.batcher import Batcher
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.student.placed import PlacedStudent

TEACHER = "teacher"
SAMPLED = SamplingSpec(max_tokens=DIGITS + 2, temperature=1.0, top_p=1.0, n=1)
GREEDY = SamplingSpec(max_tokens=DIGITS + 2, temperature=0.0, top_p=1.0, n=1)


def config_of(steps: int) -> RunConfig:
    """On-policy runs with the recommended objective."""
    return RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {TEACHER: {"model": TEACHER}},
            "data": {"train": "prompts.jsonl"},
            "rollout": {"n": 1, "max_tokens": SAMPLED.max_tokens},
            "loss": {"kind": "forward_kl", "top_k": 16},
            "train": {"steps": steps, "batch_size": 42, "lr": 2e-3, "warmup_steps": 10},
            "async": {"staleness_threshold": 0.0, "sync_steps": 1},
            "eval": {"every": 0, "before": False, "teachers": False},
        }
    )


class _Silent:
    """The pipeline's calls of a stage that has nothing to report."""

    async def progress(self) -> Progress:
        return Progress(0)

    async def events(self, seen: int, wait: bool = True) -> Events:
        await asyncio.Event().wait()
        raise AssertionError

    async def report(self) -> Any:
        return StageReport()


@dataclass
class Rollouts(_Silent):
    """Answers all groups that are admitted, at once."""

    student: TorchModel
    queue: MessageQueue

    async def run(self) -> None:
        """See core.stages.Rollouter."""
        while True:
            lease = await self.queue.get(PROMPTS, 64)
            prompts = [group.prompt for group in unpack(Group, lease.batches)]
            uids = [rollout_uid(prompt.uid, 0) for prompt in prompts]
            made = self.student.sample(uids, prompts, SAMPLED)
            await self.queue.put(rollouts_topic(TEACHER), Batch.pack(made))
            await self.queue.ack(PROMPTS, lease.id)


@dataclass
class Scoring(_Silent):
    """Scores all rollouts that are there, at once."""

    teacher: TorchModel
    queue: MessageQueue

    async def run(self) -> None:
        """See core.stages.TeacherScorer."""
        topic = rollouts_topic(TEACHER)
        while True:
            lease = await self.queue.get(topic, 64)
            for batch in lease.batches:
                await self.queue.put(SCORED, await self.teacher.score(batch))
            await self.queue.ack(topic, lease.id)

    async def report(self) -> dict[str, StageReport]:
        """Nothing, by teacher."""
        return {TEACHER: StageReport()}


@dataclass
class Training(_Silent):
    """The real batcher and learner."""

    learner: Learner
    batcher: Batcher
    version: int = 0
    steps: int = 0

    async def step(self) -> StepReport:
        """See core.stages.Trainer."""
        taken = await self.batcher.take(self.version)
        found = self.learner.train_batch(taken.samples)
        self.steps += 1
        staleness = tuple(header.staleness(self.version) for header in taken.headers)
        await self.batcher.done()
        return StepReport(self.steps, taken.headers, staleness, found.metrics)


@dataclass
class Sync:
    """Copies the learner's weights to the student that samples."""

    training: Training
    student: TorchModel

    async def snapshot(self, version: int, again: bool = False) -> None:
        """See core.stages.WeightSync."""
        self.training.version = version

    async def push(self) -> SyncReport:
        """See core.stages.WeightSync."""
        self.student.model.load_state_dict(self.training.learner.model.state_dict())
        self.student.version = self.training.version
        return SyncReport(self.student.version, {})


@dataclass
class Prompts:
    """All given prompts again and again."""

    ids: np.ndarray[Any, Any]
    cursor: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def next(self, count: int) -> list[Prompt]:
        """The next ``count``."""
        first, self.cursor = self.cursor, self.cursor + count
        return [self.find(Uid(f"p:{number}#0")) for number in range(first, self.cursor)]

    def find(self, uid: Uid) -> Prompt:
        """The prompt of a uid."""
        number = int(uid.partition(":")[2].partition("#")[0])
        return Prompt(uid, TEACHER, TEACHER, self.ids[number % len(self.ids)].astype(np.int32))


@dataclass
class Log:
    """Keeps nothing but messages."""

    last: dict[str, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def summarize(self, metrics: Mapping[str, float]) -> None: ...
    def waits(self, waits: Mapping[str, str]) -> None: ...
    def busy(self, pools: Mapping[str, Sequence[Any]]) -> None: ...

    def message(self, text: str, level: str = "info") -> None:
        """Keeps it."""
        self.messages.append(text)

    def dead_letter(self, letter: Any) -> None:
        """None may be lost."""
        raise AssertionError(letter)


async def _nothing_dies(*_: Any) -> None:
    await asyncio.Event().wait()


async def distil(student: Any, teacher: Any, prompts: Any, steps: int, seed: int) -> Any:
    """The student after so many steps. ``prompts``: token ids [N, P]."""
    torch.manual_seed(seed)
    config = config_of(steps)
    queue = MessageQueue(topics([TEACHER]), 1024, 1 << 30, 1e9, kept=(PROMPTS,))
    rollouts = Rollouts(TorchModel(student, seed), queue)
    objective = build_objective(config.loss)
    trained = TorchModel(student).model
    learner = Learner(Rank(PlacedStudent(trained, objective, config.train, torch.device("cpu"))))
    training = Training(learner, Batcher(queue, batch_size=config.train.batch_size))
    stages: Any = SimpleNamespace(
        queue=queue,
        rollouter=rollouts,
        scorer=Scoring(TorchModel(teacher), queue),
        trainer=training,
        sync=Sync(training, rollouts.student),
        supervise=_nothing_dies,
    )
    await Pipeline(config, stages, Prompts(prompts), None, Log()).run()
    assert training.steps == steps
    return learner.model
