"""The rollout stage: the student's replicas as one pool.

    topic prompts ──► replica.run, each pulls what it has room for ──► topic rollouts/<teacher>

There is no dispatcher: a replica takes the next groups when it has free slots, so that work goes
where there is room. A replica that dies leaves the pool, and what it had taken goes to the others;
the last one's error ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.reports import merge_reports
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import PROMPTS, Queue, SamplingSpec, StageReport


class Replica(Protocol):
    """What the stage needs of a student replica."""

    async def run(self) -> None: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def report(self) -> StageReport: ...


class RollouterStage:
    """Implements ``async_opd.core.stages.Rollouter`` over named replicas of one student.

    ``lost(name, error)`` is told of every replica that leaves the pool.
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        queue: Queue,
        lost: Callable[[str, Exception], None] = lambda name, error: None,
    ) -> None:
        self._alive = dict(replicas)
        self._queue = queue
        self._lost = lost

    async def run(self) -> None:
        """Until cancelled, or until the last replica has failed: then its error."""
        async with asyncio.TaskGroup() as group:
            for name, replica in list(self._alive.items()):
                group.create_task(self._watch(name, replica), name=name)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Evaluation: the prompts spread evenly over the replicas, results in order.

        What a replica did not answer before it died is answered by the others.
        """
        left = list(prompts)
        by_uid: dict[str, Rollout] = {}
        while left:
            names = list(self._alive)[: len(left)]
            parts = [left[index :: len(names)] for index in range(len(names))]
            answers = await asyncio.gather(
                *(
                    self._alive[name].generate(part, sampling)
                    for name, part in zip(names, parts, strict=True)
                ),
                return_exceptions=True,
            )
            left = []
            for name, part, answer in zip(names, parts, answers, strict=True):
                if isinstance(answer, BaseException):
                    await self._lose(name, answer)
                    left += part
                else:
                    by_uid |= {rollout.uid: rollout for rollout in answer}
        return [by_uid[f"{p.uid}/{index}"] for p in prompts for index in range(sampling.n)]

    async def report(self) -> StageReport:
        """All replicas' reports as one."""
        names = list(self._alive)
        reports = await asyncio.gather(
            *(self._alive[name].report() for name in names), return_exceptions=True
        )
        found = []
        for name, report in zip(names, reports, strict=True):
            if isinstance(report, BaseException):
                await self._lose(name, report)
            else:
                found.append(report)
        merged = merge_reports(found)
        return StageReport(
            counters=merged.counters,
            gauges={**merged.gauges, "replicas": float(len(self._alive))},
            busy=merged.busy,
            waits_for=merged.waits_for,
        )

    async def _watch(self, name: str, replica: Replica) -> None:
        try:
            await replica.run()
        except Exception as error:
            await self._lose(name, error)
        else:
            await self._lose(name, StageError(name, "its loop ended while the run was going on"))

    async def _lose(self, name: str, error: BaseException) -> None:
        """The replica leaves the pool; raises its error if it was the last, or no failure.

        A rollout's fault is nobody's death: it would follow its prompt from replica to replica.
        """
        if not isinstance(error, Exception) or isinstance(error, RolloutFault):
            raise error
        if self._alive.pop(name, None) is None:
            return
        if not self._alive:
            raise error
        self._lost(name, error)
        await self._queue.release(PROMPTS, name)
