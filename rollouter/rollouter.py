"""The rollout stage: hands admitted prompts to the student's replicas.

    submit(prompts) ──balancer──► replica.rollout ──► topic rollouts/<teacher>

Consumes prompts, produces nothing itself (replicas write to the queue), waits for a free place on
a replica. Unblocked by finished groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from async_opd.core.balancer import Balancer
from async_opd.core.reports import merge_reports
from async_opd.core.samples import Group, Prompt, Rollout
from async_opd.core.stages import SamplingSpec, StageReport


class Replica(Protocol):
    """What the stage needs of a student replica."""

    async def rollout(self, group: Group) -> int: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def report(self) -> StageReport: ...


class RollouterStage:
    """Implements ``async_opd.core.stages.Rollouter`` over replicas of one student."""

    def __init__(
        self, replicas: Sequence[Replica], slots: int, group_size: int, max_tokens: int
    ) -> None:
        """``slots`` is the number of requests one engine works on at a time."""
        self._replicas = list(replicas)
        self._max_tokens = max_tokens
        self._balancer = Balancer(self._replicas, max(1, slots // group_size))
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    async def submit(self, groups: Sequence[Group]) -> None:
        """Starts the groups in order; waits while every replica is full."""
        for group in groups:
            started = asyncio.Event()
            task = asyncio.create_task(self._roll(group, started), name=f"group {group.prompt.uid}")
            self._tasks.add(task)
            task.add_done_callback(self._finished)
            starting = asyncio.create_task(started.wait())
            await asyncio.wait({starting, task}, return_when=asyncio.FIRST_COMPLETED)
            starting.cancel()

    async def run(self) -> None:
        """Waits for the first failure of a replica and raises it; ends by cancellation only."""
        try:
            await self._failure()
        finally:
            for task in self._tasks:
                task.cancel()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Evaluation: the prompts spread evenly over the replicas, results in order."""
        count = len(self._replicas)
        parts = await asyncio.gather(
            *(
                replica.generate(prompts[index::count], sampling)
                for index, replica in enumerate(self._replicas)
                if prompts[index::count]
            )
        )
        by_uid = {rollout.uid: rollout for part in parts for rollout in part}
        return [by_uid[f"{p.uid}/{index}"] for p in prompts for index in range(sampling.n)]

    async def report(self) -> StageReport:
        """All replicas' reports as one."""
        return merge_reports(await asyncio.gather(*(r.report() for r in self._replicas)))

    async def _roll(self, group: Group, started: asyncio.Event) -> None:
        tokens = len(group.prompt.token_ids) + len(group.members) * self._max_tokens
        async with self._balancer.acquire(tokens) as replica:
            started.set()
            await replica.rollout(group)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        failure = self._failure()
        if error is not None and not failure.done():
            failure.set_exception(error)

    def _failure(self) -> asyncio.Future[None]:
        """Ends with the first failure, whether ``run`` waits for it yet or not."""
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        return self._failed
