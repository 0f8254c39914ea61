"""The scoring stage: moves rollouts through their teachers.

    topic rollouts/<teacher> ──lease──► balancer ──► replica.score ──► topic scored

One set of loops per teacher: a slow teacher holds up nobody else. Consumes leases of rollouts,
produces samples, waits for rollouts, for a free place on a replica and for room in the queue. A
lease is acknowledged with the next get, after its samples are in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from async_opd.core.balancer import Balancer
from async_opd.core.batch import Batch
from async_opd.core.reports import merge_reports
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SCORED, Queue, SamplingSpec, StageReport, rollouts_topic

IN_FLIGHT = 2
"""Batches in flight per replica: one in the engine, one behind it."""


class Replica(Protocol):
    """What the stage needs of a teacher replica."""

    async def score(self, batch: Batch) -> Batch: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def report(self) -> StageReport: ...


class ScorerStage:
    """Implements ``async_opd.core.stages.TeacherScorer`` over the replicas of all teachers."""

    def __init__(
        self,
        teachers: Mapping[str, Sequence[Replica]],
        queue: Queue,
        batch_sizes: Mapping[str, int],
    ) -> None:
        """``batch_sizes[teacher]`` is the most rollouts in one call to a replica of it."""
        self._teachers = {name: list(replicas) for name, replicas in teachers.items()}
        self._balancers = {
            name: Balancer(replicas, IN_FLIGHT) for name, replicas in self._teachers.items()
        }
        self._queue = queue
        self._batch_sizes = dict(batch_sizes)

    async def run(self) -> None:
        """Scores until cancelled; the first failure ends all loops and is raised."""
        async with asyncio.TaskGroup() as group:
            for name, replicas in self._teachers.items():
                for index in range(IN_FLIGHT * len(replicas)):
                    group.create_task(self._score(name), name=f"teacher {name} loop {index}")

    async def _score(self, teacher: str) -> None:
        balancer, topic = self._balancers[teacher], rollouts_topic(teacher)
        done: int | None = None
        while True:
            lease = await self._queue.get(topic, self._batch_sizes[teacher], ack=done)
            rollouts = Batch.join(lease.batches)
            tokens = sum(header.tokens for header in rollouts.headers)
            async with balancer.acquire(tokens) as replica:
                samples = await replica.score(rollouts)
            await self._queue.put(SCORED, samples)
            done = lease.id

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """The teacher's own answers, from its first replica."""
        return await self._teachers[teacher][0].generate(prompts, sampling)

    async def report(self) -> dict[str, StageReport]:
        """One report per teacher."""
        reports = {}
        for name, replicas in self._teachers.items():
            reports[name] = merge_reports(await asyncio.gather(*(r.report() for r in replicas)))
        return reports
