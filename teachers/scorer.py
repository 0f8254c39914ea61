"""The scoring stage: moves rollouts through their teachers.

    topic rollouts/<teacher> ──lease──► pool ──► topic scored
                                         └─────► topic dead: what no replica could score

One set of loops per teacher: a slow teacher holds up nobody else. Consumes leases of rollouts,
produces samples, waits for rollouts, for a free place on a replica and for room in the queue. A
lease is acknowledged with the next get, after its samples are in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from async_opd.core.batch import Batch
from async_opd.core.config import HealthConfig
from async_opd.core.errors import LeaseExpired
from async_opd.core.queue import Lease
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import DEAD, SCORED, Queue, SamplingSpec, StageReport, rollouts_topic
from teachers.pool import IN_FLIGHT, Health, Rebuild, Replica, TeacherPool, Weights


class ScorerStage:
    """Implements ``async_opd.core.stages.TeacherScorer`` over the replicas of all teachers."""

    def __init__(
        self,
        teachers: Mapping[str, Sequence[Replica]],
        queue: Queue,
        batch_sizes: Mapping[str, int],
        health: Mapping[str, Health] | None = None,
        rebuild: Rebuild | None = None,
        consumer: str = "",
    ) -> None:
        """``batch_sizes[teacher]`` is the most rollouts in one call to a replica of it.

        ``consumer`` is what the queue knows this stage by.
        """
        health = health or {}
        self._pools = {
            name: TeacherPool(name, replicas, health.get(name, HealthConfig()), rebuild)
            for name, replicas in teachers.items()
        }
        self._queue = queue
        self._batch_sizes = dict(batch_sizes)
        self._rebuild = rebuild
        self._consumer = consumer
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Scores until cancelled; what no pool can mend ends all loops and is raised."""
        self._work = asyncio.create_task(self._run(), name="scoring")
        try:
            await self._work
        finally:
            self._work.cancel()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, pool in self._pools.items():
                group.create_task(pool.run(), name=f"teacher {name}")
                for index in range(IN_FLIGHT * len(pool.balancer.replicas)):
                    group.create_task(self._score(name), name=f"teacher {name} loop {index}")

    async def _score(self, teacher: str) -> None:
        done: int | None = None
        while True:
            lease = await self._next(teacher, done)
            scored = await self._pools[teacher].score(Batch.join(lease.batches))
            if scored.samples:
                await self._queue.put(SCORED, Batch.join(scored.samples))
            if scored.lost:
                await self._queue.put(DEAD, Batch.pack(scored.lost))
            done = lease.id

    async def _next(self, teacher: str, done: int | None) -> Lease:
        topic, size = rollouts_topic(teacher), self._batch_sizes[teacher]
        try:
            return await self._queue.get(topic, size, ack=done, consumer=self._consumer)
        except LeaseExpired:  # its rollouts are scored again; the trainer knows them
            return await self._queue.get(topic, size, consumer=self._consumer)

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """The teacher's own answers, from one of its replicas."""
        return await self._pools[teacher].generate(prompts, sampling)

    async def load(self, teacher: str, weights: Weights) -> None:
        """New weights for all replicas of a teacher."""
        await self._pools[teacher].load(weights)

    async def report(self) -> dict[str, StageReport]:
        """One report per teacher."""
        reports = await asyncio.gather(*(pool.report() for pool in self._pools.values()))
        return dict(zip(self._pools, reports, strict=True))

    async def shutdown(self) -> None:
        """Stops scoring, and ends the replicas that were rebuilt."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
        if self._rebuild is not None:
            await self._rebuild.close()
