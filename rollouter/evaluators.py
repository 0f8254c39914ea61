"""Student replicas that only evaluate: an evaluation measures exactly one weight version.

    evaluation ──► refresh: the newest weights, while they are idle ──► answers of that version
                        ▲                                                     │
                        └── one of them was rebuilt meanwhile, with later weights

They take no prompts of the queue, and no part in a weight sync of the rollout replicas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from async_opd.core.reports import StageReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from rollouter.stage import RollouterStage


class Evaluators:
    """The pool ``stage``; ``refresh()`` gives the newest weights to its replicas."""

    def __init__(self, stage: RollouterStage, refresh: Callable[[], Awaitable[None]]) -> None:
        self.stage = stage
        self._refresh = refresh

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Answers of one version, the newest when it begins; see RollouterStage.generate.

        It begins anew after a replica was rebuilt, which then has a later version: as often as
        ``supervision.max_restarts`` allows.
        """
        while True:
            await self._refresh()
            found = await self.stage.generate(prompts, sampling)
            if len({span.version for one in found for span in one.version_spans}) <= 1:
                return found

    async def added_to(self, report: StageReport) -> StageReport:
        """The report of the rollout replicas, and what these replicas did since the last one.

        ``rebuilds`` are those of all. The work of these replicas is in the trace and in
        ``eval_busy_s``, and in no other counter or busy share: none of it is a rollout.
        """
        own = await self.stage.report()
        gauges = {
            "rebuilds": report.gauges["rebuilds"] + own.gauges["rebuilds"],
            "eval_replicas": own.gauges["replicas"],
        }
        busy_s = sum(interval.end - interval.start for interval in own.busy)
        return replace(
            report,
            counters={**report.counters, "eval_busy_s": busy_s},
            gauges={**report.gauges, **gauges},
            spans=(*report.spans, *own.busy, *own.spans),
        )
