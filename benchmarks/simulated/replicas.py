"""A student and a teacher replica that only take time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from async_opd.config.sections.plan import RolloutPlan, TeacherPlan
from async_opd.core.batch import Batch, unpack
from async_opd.core.reports import Progress, StageReport
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.scores import SampledLogprobs, Scores, TopK
from async_opd.core.stages import Queue, SamplingSpec
from async_opd.observability.activity import Activity
from async_opd.tools.plan.setting import Lengths
from async_opd.waiting.deadline import Gate
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from benchmarks.simulated.decoder import Decoder
from rollouter.rollout_worker import RolloutWorker
from rollouter.slots import Slots
from rollouter.spec import StudentEngineSpec
from teachers.spec import TeacherEngineSpec


class SimulatedStudent:
    """Behaves as ``rollouter.replica.StudentReplica`` with ``on_sync: keep``."""

    def __init__(
        self,
        spec: StudentEngineSpec,
        queue: Queue,
        speed: RolloutPlan,
        slots: int,
        lengths: Lengths,
        sync_s: float,
    ) -> None:
        self.consumer = spec.consumer
        self._decoder = Decoder(speed)
        self._lengths = lengths
        self._sync_s = sync_s
        self._version = 0
        room = Slots(slots, spec.sampling.n)
        self._worker = RolloutWorker(spec.consumer, queue, room, self._awake)
        self._gate = Gate()
        self._activity = Activity("generate", track=spec.name)
        self._random = random.Random(spec.name)
        self._tokens = 0

    async def ready(self) -> int:
        """One worker."""
        return 1

    async def run(self) -> None:
        """Answers groups until stopped."""
        await self._worker.run()

    async def stop(self) -> None:
        """Ends ``run``."""
        await self._worker.stop()

    async def stop_evaluation(self) -> None:
        """It answers no evaluation."""

    async def _awake(self, prompt: Prompt, uid: str) -> Rollout:
        async with self._gate:
            return await self._roll(prompt, uid)

    async def _roll(self, prompt: Prompt, uid: str) -> Rollout:
        length = self._length(prompt)
        with self._activity.busy() as begun:
            spans = await self._decoder.decode(length)
            self._activity.sampled(uid, begun)
        self._tokens += length
        return Rollout.plain(
            uid=uid,
            prompt=prompt,
            response_ids=np.zeros(length, dtype=np.int32),
            rollout_logprobs=np.zeros(length, dtype=np.float32),
            version_spans=spans,
            finish_reason="length" if length == self._lengths.most else "stop",
        )

    def _length(self, prompt: Prompt) -> int:
        """Tokens of a response."""
        return self._lengths.sample(self._random)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Nothing to evaluate."""
        return []

    async def alive(self) -> None:
        """It works."""

    async def idle(self) -> None:
        """Returns without a request."""
        await self._gate.empty()

    async def sleep(self) -> None:
        """Finishes its requests; later ones wait."""
        await self._gate.close()

    async def wake(self) -> None:
        """Requests again."""
        self._gate.open()

    async def progress(self) -> Progress:
        """The tokens that each running request has received."""
        return Progress(int(self._decoder.tokens), self._lengths.most * self._decoder.running)

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        """There is no group."""

    async def pause(self, on_sync: str) -> None:
        """Stops the tokens."""
        self._paused = self._activity.clock()
        self._decoder.pause()

    async def receive(self, meta: WeightMeta) -> None:
        """Takes ``sync_s``."""
        await asyncio.sleep(self._sync_s)

    async def finish(self, version: int) -> None:
        """Names the weights."""
        self._version = version

    async def resume(self) -> None:
        """Tokens again."""
        self._decoder.resume(self._version)
        self._activity.span("sync", self._paused)

    async def report(self) -> StageReport:
        """Tokens and busy time."""
        tokens, self._tokens = self._tokens, 0
        return StageReport(
            counters={"tokens": float(tokens)},
            gauges={"in_flight": float(self._activity.depth), "version": float(self._version)},
            busy=self._activity.drain(),
            spans=self._activity.drain_spans(),
        )

    async def shutdown(self) -> None:
        """Nothing to end."""


class SimulatedTeacher:
    """Behaves as ``teachers.replica.TeacherReplica``: one batch at a time."""

    def __init__(self, spec: TeacherEngineSpec, speed: TeacherPlan, top_k: int) -> None:
        self._speed = speed
        self._top_k = top_k
        self._free = asyncio.Lock()
        self._activity = Activity("score", track=spec.name)
        self._tokens = 0

    async def ready(self) -> int:
        """One worker."""
        return 1

    async def sleep(self) -> None:
        """Nothing to free."""

    async def wake(self) -> None:
        """Nothing to take."""

    async def score(self, batch: Batch) -> Batch:
        """Takes the time of its tokens."""
        async with self._free:
            with self._activity.busy() as begun:
                await asyncio.sleep(self._speed.seconds(batch.tokens))
                for header in batch.headers:
                    self._activity.sampled(header.uid, begun)
        self._tokens += batch.tokens
        return Batch.pack(Sample(r, self._scores(r)) for r in unpack(Rollout, [batch]))

    def _scores(self, rollout: Rollout) -> Scores:
        length, k = len(rollout.response_ids), self._top_k
        sampled = np.zeros(length, dtype=np.float32)
        if not k:
            return SampledLogprobs(sampled)
        best = np.tile(np.arange(k, dtype=np.int32), (length, 1))
        return TopK(best, np.full((length, k), -np.log(k), np.float32), sampled, sampled)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Nothing to evaluate."""
        return []

    async def report(self) -> StageReport:
        """Tokens and busy time."""
        tokens, self._tokens = self._tokens, 0
        return StageReport(
            counters={"tokens": float(tokens)},
            gauges={"in_flight": float(self._activity.depth)},
            busy=self._activity.drain(),
            spans=self._activity.drain_spans(),
        )

    async def shutdown(self) -> None:
        """Nothing to end."""
