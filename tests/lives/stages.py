"""The stages of a life: the real ones, over fake engines and a fake learner, in one process.

The weights of the fake learner are the list of the steps that made them, each with a mark of its
own: so a checkpoint, a model, a row of metrics and an evaluation say which way of the run they are
of. The engines' answers carry the mark of the weights that sampled them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ProcessDied, StageError
from async_opd.core.reports import StageReport, SyncReport, WrittenFile
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.stages import TRAINER, SamplingSpec
from async_opd.core.uid import rollout_uid
from async_opd.files.durable import written_file
from async_opd.media.cache import MediaCache
from rollouter.stage import Evaluators, RollouterStage
from tests.test_rewind import Handle
from tests.trainer.test_hand_out import Planner
from tests.world.clock import Straggling
from tests.world.faults import Faults
from tests.world.prompts import IMAGE_BYTES
from tests.world.run import world
from tests.world.students import FakeStudent
from trainer.batcher import Batcher
from trainer.batches.shares import Fetched, Plan
from trainer.learner import LearnerReport
from trainer.rank_group import SINGLE_RANK, SingleRank
from trainer.stage import TrainerStage

HISTORY = "history.json"
"""The weights, in a checkpoint and in the model."""


@dataclass(frozen=True)
class Weights:
    """A version that replicas have; ``mark`` is that of the step which made it."""

    version: int = 0
    mark: float = 0.0


class Student(FakeStudent):
    """Its answers carry the mark of its weights, negated, as log-probabilities."""

    mark = 0.0

    def load(self, weights: Weights) -> None:
        self.version, self.mark = weights.version, weights.mark

    def rollout(self, prompt: Prompt, index: int, version: int) -> Rollout:
        made = super().rollout(prompt, index, version)
        made.rollout_logprobs[:] = -self.mark
        return made

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        for prompt in prompts:
            await self.media.get(prompt.media, of=rollout_uid(prompt.uid, 0))
        return await super().generate(prompts, sampling)


class Ranks(SingleRank):
    """Two ranks, the second of which has nothing to fetch: headers are leased, not payloads."""

    ranks = 2

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        return lambda: [Fetched()]


class Learner(Planner):
    """The steps trained so far; ``bad`` ones degenerate while the learning rate is too high."""

    def __init__(self, chance: random.Random, bad: Mapping[int, float]) -> None:
        super().__init__(1)
        self._chance, self._bad = chance, bad
        self.history: list[dict[str, Any]] = []
        self.version, self.lr_factor, self.computed_tokens = 0, 1.0, 0
        self._captured = ""

    def train(self, plan: Plan, own: Any, repetition: float, number: int) -> LearnerReport:
        samples = [sample for one in own for sample in one.samples]
        shown = {sha256 for one in own for sha256 in one.images}
        assert sorted(s.rollout.uid for s in samples) == sorted(h.uid for h in plan.headers)
        return self.train_batch(samples, dict.fromkeys(shown, b""))

    def train_batch(self, samples: Sequence[Sample], images: Mapping[str, bytes]) -> LearnerReport:
        assert {m.sha256 for s in samples for m in s.rollout.prompt.media} <= images.keys()
        step, mark = len(self.history) + 1, round(self._chance.random(), 6)
        bad = self.lr_factor > self._bad.get(step, 1.0)
        uids = sorted(sample.rollout.uid for sample in samples)
        self.history.append({"step": step, "mark": mark, "uids": uids, "lr": self.lr_factor})
        self.computed_tokens += 1
        form = {"train/repetition": 0.0, "train/mean_response_tokens": 4.0}
        form |= {"train/truncated_share": float(bad), "life/mark": mark}
        return LearnerReport(form | {"loss/total": 1.0})

    def capture(self, version: int) -> int:
        self._captured = json.dumps({"version": version, "steps": self.history})
        return len(self._captured)

    def write(self, directory: str) -> dict[str, WrittenFile]:
        path = Path(directory) / HISTORY
        path.write_text(self._captured)
        return {HISTORY: written_file(path)}

    def restore(self, directory: str) -> tuple[int, int]:
        found = json.loads((Path(directory) / HISTORY).read_text())
        self.history = found["steps"]
        return len(self.history), found["version"]

    def save(self, model_dir: str, directory: str) -> None:
        Path(directory).mkdir(exist_ok=True)
        (Path(directory) / HISTORY).write_text(json.dumps({"steps": self.history}))


@dataclass
class Inline:
    """The trainer's threads: the work is done after a while, at once."""

    pace: Straggling

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        await self.pace.wait()
        return work(*args)


class Sync:
    """Snapshots and pushes exclude each other, as those of BroadcastSync do."""

    def __init__(self, trainer: Any, learner: Learner, students: list[Student], pace: Any) -> None:
        self._trainer, self._learner, self._pace = trainer, learner, pace
        self._students = students
        self._lock = asyncio.Lock()
        self.newest: Weights | None = None

    async def snapshot(self, version: int, again: bool = False) -> None:
        async with self._lock:
            await self._trainer.snapshot(version)
            steps = self._learner.history
            self.newest = Weights(version, steps[-1]["mark"] if steps else 0.0)

    async def push(self) -> SyncReport:
        async with self._lock:
            assert self.newest is not None
            for student in self._students:
                await self._pace.wait()
                student.load(self.newest)
            return SyncReport(self.newest.version, {"sync/seconds": 0.1})

    async def refresh(self, evaluators: Sequence[Student]) -> None:
        async with self._lock:
            for student in evaluators:
                await self._pace.wait()
                student.load(self.newest or Weights())


@dataclass
class Shape:
    """The settings of a life's processes that the config does not have."""

    faults: Faults
    bad: Mapping[int, float] = field(default_factory=dict)
    """Step by the learning rate's factor from which on it is not bad any more."""


class Cluster:
    """Implements LaunchedStages: stages that die, and are replaced while the engines stay."""

    def __init__(self, config: RunConfig, shape: Shape, seed: int) -> None:
        self.config, self.shape, self.seed = config, shape, seed
        self.trainer: Any = Handle(self)  # type: ignore[arg-type]
        self._begin()

    async def watched(self, work: Awaitable[None]) -> None:
        """See LaunchedStages."""
        await work

    def _begin(self) -> None:
        self.seed += 1
        config, pace = self.config, Straggling(self.seed)
        self.death = asyncio.Event()
        batch, n = config.train.batch_size, config.rollout.n
        made: Any = world(
            self.seed,
            steps=config.train.steps,
            batch_size=batch,
            n=n,
            k=config.async_.sync_steps,
            s=config.async_.staleness_threshold,
            groups=config.reward is not None,
            pace=pace,
            replicas=0,
        )
        self.world, self.queue, self.scorer = made, made.queue, made.scorer
        names = range(config.rollout.replicas + config.eval.replicas)
        every = [Student(f"student/{index}", made.queue, n, pace) for index in names]
        made.students, evaluators = (
            every[: config.rollout.replicas],
            every[config.rollout.replicas :],
        )
        self.shape.faults.into(made, self.seed)
        several = config.train.ranks > 1
        batcher = Batcher(
            made.queue,
            batch_size=batch,
            max_version_lag=config.async_.lag_to("requeue"),
            group_size=n if config.reward is not None else 1,
            payloads=not several,
        )
        learner: Any = Learner(random.Random(self.seed), self.shape.bad)
        publisher: Any = SimpleNamespace(snapshot=SimpleNamespace)
        made.trainer = self.stage = TrainerStage(
            learner,
            publisher,
            batcher,
            max_version_lag=config.async_.max_version_lag,
            model_dir="",
            rank_group=Ranks() if several else SINGLE_RANK,
            media=MediaCache(made.queue.media, IMAGE_BYTES),
        )
        self.stage._computing = self.stage._sending = Inline(pace)  # type: ignore[assignment]
        self._batcher = batcher
        self.sync = Sync(self.trainer, learner, made.students, pace)
        self.rollouter = Rollouts(made.students, evaluators, self.sync, made.queue)
        self.students = every

    def die(self) -> None:
        self.death.set()

    async def supervise(
        self, reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        queue, death = self.queue, self.death

        async def reissues() -> None:
            while True:
                await queue.reissue.wait()
                queue.reissue.clear()
                group.create_task(reissue())

        async with asyncio.TaskGroup() as group:
            group.create_task(reissues())
            await death.wait()
            raise ProcessDied(TRAINER, "its process died")

    async def rewind(self, error: StageError) -> None:
        before = [Weights(student.version, student.mark) for student in self.students]
        self.close()
        self._begin()
        for student, weights in zip(self.students, before, strict=True):
            student.load(weights)

    async def save_early(self, directory: str) -> None:
        await self.trainer.save(directory)

    def close(self) -> None:
        """Work of the trainer's process ends with it."""
        self.death.set()
        self._batcher.close()
        if self.stage._hand_out is not None:
            self.stage._hand_out.close()


class Rollouts:
    """The rollout replicas, and beside them those that only evaluate, if there are any."""

    def __init__(
        self, students: list[Student], evaluators: list[Student], sync: Sync, queue: Any
    ) -> None:
        self.stage = RollouterStage({one.name: one for one in students}, queue)
        self._queue = queue
        self._evaluating = RollouterStage({one.name: one for one in evaluators}, queue, pool="eval")
        self._answers: Any = self.stage
        if evaluators:
            self._answers = Evaluators(self._evaluating, lambda: sync.refresh(evaluators))

    async def run(self) -> None:
        await self.stage.run()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        found: list[Rollout] = await self._answers.generate(prompts, sampling)
        return found

    async def report(self) -> StageReport:
        return await self.stage.report()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)
