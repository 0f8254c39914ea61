"""The real batcher without a learner, and a checkpointer that writes when it is waited for."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from async_opd.core.batch import unpack
from async_opd.core.errors import NotLeased
from async_opd.core.reports import Captured, Progress, StageReport, StepReport, WrittenFile
from async_opd.core.samples import Rollout, Sample
from async_opd.core.stages import SCORED
from async_opd.files.durable import written_file
from async_opd.media.cache import MediaCache
from async_opd.queue.payloads import read
from tests.world.clock import Pace
from tests.world.prompts import IMAGE_BYTES
from tests.world.students import fetch
from trainer.batcher import Batcher, TrainBatch
from trainer.saving.sample_file import SCORED_FILE, read_scored, write_scored


class FakeTrainer:
    """The real batcher, and no learner."""

    def __init__(self, batcher: Batcher, pace: Pace) -> None:
        self.batcher, self.pace = batcher, pace
        self.media = MediaCache(batcher.queue.media, IMAGE_BYTES)
        self.version = self.steps = 0
        self.staleness: list[int] = []
        self.metrics = {"loss/total": 1.0}
        self.trained: list[tuple[str, int]] = []
        self.rollouts: list[Rollout] = []
        self.hang = False
        self.last: StepReport | None = None
        self.lr_factor = 1.0
        self.state: tuple[int, int, asyncio.Task[tuple[Sample, ...]]]

    async def step(self) -> StepReport:
        if self.hang:
            await asyncio.Event().wait()
        taken, samples = await self._take()
        await self.pace.wait()
        for sample in samples:
            await fetch(self.media, sample.rollout.prompt, sample.rollout.uid)
        staleness = tuple(header.staleness(self.version) for header in taken.headers)
        self.staleness += staleness
        self.trained += [(sample.rollout.uid, self.version) for sample in samples]
        self.rollouts += [sample.rollout for sample in samples]
        self.steps += 1
        self.last = StepReport(self.steps, taken.headers, staleness, self.metrics, taken.requeued)
        await self.batcher.done()
        return self.last

    async def _take(self) -> tuple[TrainBatch, Sequence[Sample]]:
        """A batch and its samples; those of leased headers are fetched, as several ranks do."""
        while not self.batcher.payloads:
            batch = await self.batcher.choose(lambda: self.version)
            leased: defaultdict[int, list[str]] = defaultdict(list)
            for header, lease in zip(batch.headers, batch.leases, strict=True):
                leased[lease].append(header.uid)
            try:
                queue = self.batcher.queue
                fetched = await read(queue, SCORED, [await queue.fetch(SCORED, leased)])
            except NotLeased as error:
                lost = {lease for lease, uids in leased.items() if {*uids} & {*error.uids}}
                await self.batcher.forget(lost)
                continue
            if self.batcher.commit(batch, self.version):
                found = {sample.rollout.uid: sample for sample in unpack(Sample, fetched)}
                return batch, [found[header.uid] for header in batch.headers]
        taken = await self.batcher.take(self.version)
        return taken, taken.samples

    async def save(self, directory: str) -> None: ...

    async def scale_learning_rate(self, factor: float) -> None:
        self.lr_factor = factor

    async def progress(self) -> Progress:
        return Progress(0)

    async def drop(self, lost: str, others: Sequence[str] = ()) -> bool:
        return await self.batcher.drop(lost, others)

    async def capture(self) -> Captured:
        self.state = (self.steps, self.version, self.batcher.copy_held())
        return Captured(self.steps, self.last)

    async def checkpoint(self, directory: str, in_flight: frozenset[str]) -> dict[str, WrittenFile]:
        steps, version, held = self.state
        await self.pace.wait()
        queued = [one async for part in self.batcher.queued(in_flight) for one in part]
        found = {s.rollout.uid: s for s in (*queued, *await held) if s.rollout.uid in in_flight}
        own = Path(directory) / "trainer.json"
        own.write_text(json.dumps([steps, version]))
        await self.pace.wait()
        scored = write_scored(Path(directory), list(found.values()))
        await self.pace.wait()
        return {own.name: written_file(own), SCORED_FILE: scored}

    async def restore(self, directory: str) -> frozenset[str]:
        await self.pace.wait()
        self.steps, self.version = json.loads((Path(directory) / "trainer.json").read_text())
        samples = read_scored(Path(directory))
        self.batcher.hold(samples)
        await self.pace.wait()
        return frozenset(sample.rollout.uid for sample in samples)

    async def adopt(self, directory: str, step: int, version: int) -> None:
        await self.pace.wait()
        assert json.loads((Path(directory) / "weights.json").read_text()) == version
        self.steps, self.version = step, version

    async def report(self) -> StageReport:
        return StageReport()


class Disk:
    """A checkpointer; a slow one has written a checkpoint only when it is waited for."""

    timeout_s = 20.0

    def __init__(self, trainer: FakeTrainer, slow: bool) -> None:
        self.trainer, self.slow, self.metrics = trainer, slow, dict[str, float]()
        self.writing = False
        self.taken: list[int] = []

    async def take(self, cut_of: Callable[[Captured], Any]) -> None:
        if not self.writing:
            self.taken.append(cut_of(await self.trainer.capture()).step)
        self.writing = self.slow

    async def settled(self) -> None:
        self.writing = False

    async def evaluated(self, step: int, measured: Any) -> None: ...
