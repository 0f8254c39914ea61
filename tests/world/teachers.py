"""Replicas of a teacher that score, fail, hang, die and share their GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_opd.core.batch import Batch
from async_opd.core.errors import Displaced, RolloutFault, StageError
from async_opd.core.reports import StageReport
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import SamplingSpec
from async_opd.media.cache import MediaCache
from tests.world.clock import Pace
from tests.world.students import fetch


def samples(batch: Batch) -> Batch:
    """Rollouts as samples: the teacher agrees with the student."""
    rollouts = [item for item in batch.unpack() if isinstance(item, Rollout)]
    return Batch.pack(Sample(one, SampledLogprobs(one.rollout_logprobs)) for one in rollouts)


@dataclass(eq=False)
class FakeTeacher:
    """``broken`` raises, ``hangs`` never answers, ``dead`` is what its process is.

    It cannot score rollouts in ``poison``, and has no image of those in ``imageless``. It scores
    when ``gate`` is open, and goes to sleep when ``bed`` is.
    """

    name: str = "r"
    broken: bool = False
    dead: bool = False
    hangs: bool = False
    refuses: bool = False
    answer: Callable[[Batch], Batch] = samples
    poison: frozenset[str] = frozenset()
    imageless: frozenset[str] = frozenset()
    pace: Pace | None = None
    media: MediaCache | None = None
    gate: asyncio.Event | None = None
    bed: asyncio.Event | None = None
    awake: bool = True
    loaded: list[str] = field(default_factory=list)
    scored: list[tuple[str, ...]] = field(default_factory=list)

    async def score(self, batch: Batch) -> Batch:
        if self.gate is not None:
            await self.gate.wait()
        if self.pace is not None:
            await self.pace.wait()
        uids = tuple(header.uid for header in batch.headers)
        self.scored.append(uids)
        await self.ready()
        if self.broken or self.poison & set(uids):
            raise StageError(self.name, "cannot score")
        if self.imageless & set(uids):
            raise RolloutFault("prompt", "its image is not held")
        if self.media is not None:
            for rollout in batch.unpack():
                assert isinstance(rollout, Rollout)
                await fetch(self.media, rollout.prompt, rollout.uid)
        return self.answer(batch)

    async def ready(self) -> int:
        if self.dead:
            raise StageError(self.name, "its process died")
        if self.hangs:
            await asyncio.Event().wait()
        return 1

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        await self.ready()
        if self.imageless & {prompt.uid for prompt in prompts}:
            raise RolloutFault("prompt", "its image is not held")
        return [Rollout.answer(f"{prompt.uid}/0", prompt, [1], "stop") for prompt in prompts]

    async def load(self, directory: str) -> None:
        await self.ready()
        if self.refuses:
            raise StageError(self.name, "half of the weights are there")
        self.loaded.append(directory)

    async def report(self) -> StageReport:
        await self.ready()
        counters = {"tokens": 7.0, "gap": -3.0, "gap_tokens": 6.0}
        return StageReport(counters=counters, waits_for="rollouts")

    def kill(self) -> None:
        self.awake = False

    async def sleep(self) -> None:
        if self.bed is not None:
            await self.bed.wait()
        await self.ready()
        self.awake = False

    async def wake(self) -> None:
        self.awake = True


class FakeRebuild:
    """Starts replicas of one kind, after failing so many times."""

    def __init__(self, failures: int = 0, **kind: Any) -> None:
        self.failures, self.kind = failures, kind
        self.cluster: Any = None
        self.displacement: Displaced | None = None
        self.made: list[FakeTeacher] = []
        self.asked: list[int] = []
        self.closed = False

    async def __call__(self, teacher: str, index: int, old: Any) -> FakeTeacher:
        self.asked.append(index)
        if len(self.asked) <= self.failures:
            raise StageError(f"teacher {teacher}/{index}", "no memory left")
        self.made.append(FakeTeacher(f"new {index}", **self.kind))
        return self.made[-1]

    async def displaced(self, old: Any) -> Displaced | None:
        return self.displacement

    def places(self, teacher: str) -> Any:
        return self.cluster

    async def close(self) -> None:
        self.closed = True
