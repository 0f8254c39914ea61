"""The rollout stage: the student's replicas as one pool.

    topic prompts ──► replica.run, each pulls what it has room for ──► topic rollouts/<teacher>

There is no dispatcher: a replica takes the next groups when it has free slots. A replica is ejected
and rebuilt (``async_opd.processes.members``) when its loop ends, a call to it fails, it fails its
heartbeat, or its weight sync fails. Its groups go back to the topic at once, for the other replicas
or the rebuilt one. When all replicas are gone, the last one's error ends the run.

``Evaluators`` are student replicas that only evaluate: an evaluation measures exactly one weight
version.

    evaluation ──► refresh: the newest weights, while they are idle ──► answers of that version
                        ▲                                                     │
                        └── one of them was rebuilt meanwhile, with later weights

They take no prompts of the queue, and no part in a weight sync of the rollout replicas.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import Displaced, RolloutFault, StageError, StageTimeout
from async_opd.core.reports import Events, Progress, StageReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import PROMPTS, Queue, SamplingSpec
from async_opd.core.uid import Uid, rollout_uid
from async_opd.observability.metering import merge_reports
from async_opd.processes.events import Event, EventLog
from async_opd.processes.members import Member, MemberSet, Places, Policy, Probe
from async_opd.queue.sizes import EpisodeBounds, calls
from async_opd.waiting.deadline import Deadline, Timer, gather_or_cancel, race
from async_opd.waiting.liveness import ANSWER_S, CombinedProgress
from async_opd.waiting.waits import Waits

REPORT_S = 10.0
"""Seconds for a report: a replica without one is left out of the stage's report."""


class RolloutReplica(Protocol):
    """The methods of a student replica that the stage needs."""

    @property
    def consumer(self) -> str:
        """Its name in the queue."""
        ...

    async def run(self) -> None: ...

    async def stop(self) -> None:
        """Ends ``run`` and all answers under way; unfinished rollouts never reach the queue."""

    async def alive(self) -> None:
        """Returns if the replica works; raises or hangs if not."""

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def progress(self) -> Progress: ...

    async def report(self) -> StageReport: ...


RebuildStudent = Callable[[Member[Any]], Coroutine[Any, Any, RolloutReplica]]
"""Ends a member's replica and returns another with the newest weights. Raises if either fails.

``async_opd.cluster`` implements it, since it can start processes.
"""


class RollouterStage:
    """Implements ``async_opd.core.stages.Rollouter`` over named replicas of one student."""

    def __init__(
        self,
        replicas: Mapping[str, RolloutReplica | None],
        queue: Queue,
        rebuild: RebuildStudent | None = None,
        supervision: SupervisionConfig | None = None,
        *,
        timer: Timer | None = None,
        answer_s: float = ANSWER_S / 2,
        current: asyncio.Event | None = None,
        pool: str = "rollout",
        start_s: float = math.inf,
        displaced: Probe[RolloutReplica] | None = None,
        places: Places | None = None,
        quiet: Callable[[], Coroutine[Any, Any, Any]] | None = None,
        episodes: EpisodeBounds | None = None,
    ) -> None:
        """Without ``rebuild`` a replica that fails is GONE. One of None is absent: see MemberSet.

        No replica takes or answers prompts before ``current`` is set: one of them may have older
        weights than it should. None: all of them may from the start.

        ``answer_s`` bounds the answer of each replica to ``progress``; see liveness.answer_s.
        ``start_s``, ``displaced`` and ``places``: see Policy. ``quiet`` returns when no weight sync
        is under way. ``episodes``: the bounds of answers that are episodes.
        """
        self._episodes, self._queue, self._quiet = episodes, queue, quiet
        self._served: Counter[str] = Counter()  # reports, one a step, with finished rollouts
        policy = Policy[RolloutReplica](
            supervision=supervision or SupervisionConfig(),
            serve=self._serve,
            alive=self._alive,
            leave=self._leave,
            displaced=displaced,
            places=places,
            rebuild=rebuild,
            reached=lambda member: self._served[member.name],
            needed=1,
            start_s=start_s,
        )
        self._event_log = EventLog()
        self.members = MemberSet(pool, replicas, policy, timer)
        self.members.waits = Waits(self._event_log.append, timer)
        self.members.listen(self.note)
        self._progress = CombinedProgress({}, answer_s, timer)
        self._current = current or asyncio.Event()
        if current is None:
            self._current.set()

    def note(self, event: Event) -> None:
        """Adds an event to those that ``events`` returns."""
        self._event_log.append(str(event))

    async def run(self) -> None:
        """Serves until cancelled, or until the last replica is gone: then raises its error."""
        await self.members.run()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Rollouts for evaluation, in order, with the prompts spread evenly over the replicas.

        Prompts of a replica that died are answered by the others, or by the next incarnation.
        """
        await self._current.wait()
        left = list(prompts)
        by_uid: dict[Uid, Rollout] = {}
        while left:
            await self.members.until(lambda: bool(self.members.serving))
            serving = self.members.serving
            parts = [part for at in range(len(serving)) if (part := left[at :: len(serving)])]
            answers = await gather_or_cancel(
                *(
                    self._answers(member, call, sampling)
                    for member, part in zip(serving, parts, strict=False)
                    for call in calls(part, sampling, self._episodes)
                )
            )
            by_uid |= {rollout.uid: rollout for answer in answers for rollout in answer}
            left = [prompt for prompt in left if rollout_uid(prompt.uid, 0) not in by_uid]
        return [by_uid[rollout_uid(p.uid, index)] for p in prompts for index in range(sampling.n)]

    async def progress(self) -> Progress:
        """The tokens of all replicas; see ``CombinedProgress``."""
        self._progress.asks = {m.name: m.value.progress for m in self.members.serving}
        return await self._progress()

    async def events(self, seen: int, wait: bool = True) -> Events:
        """See Rollouter."""
        return await self._event_log.after(seen, wait)

    async def report(self) -> StageReport:
        """All serving replicas' reports as one; ``rebuilds`` is a total since the start."""
        found = await self.members.ask(
            REPORT_S, "a report", lambda replica: replica.report(), spare=StageTimeout
        )
        for member, one in found.items():
            self._served[member.name] += one.counters.get("tokens", 0) > 0
        merged, serving = merge_reports(found.values()), self.members.serving
        return replace(
            merged,
            gauges={
                **merged.gauges,
                "replicas": float(len(serving)),
                "rebuilds": float(self.members.rebuilds),
            },
            waits_for=self._waits_for(merged),
        )

    def _waits_for(self, merged: StageReport) -> str:
        """The pool's wait now; '' if a replica computes."""
        if not self.members.serving:
            return "a replica that is being rebuilt"
        if merged.waits_for and not self._current.is_set():
            return "the newest weights"
        return merged.waits_for

    # ── one replica ────────────────────────────────────────────────────────────────────────────

    async def _serve(self, member: Member[RolloutReplica]) -> None:
        await self._current.wait()
        await member.value.run()

    async def _leave(self, member: Member[RolloutReplica]) -> None:
        """Its groups go back to their topic; one whose node drains stops with them before.

        Such a one stays until a weight sync under way has ended: the trainer would wait for it.
        """
        drains = isinstance(member.failure, Displaced)
        bound = self.members.policy.supervision.timeout_s
        if drains:
            stopping = self.members.call(member, bound, "stopping", lambda one: one.stop())
            with suppress(StageError):  # its node is lost by now
                await stopping
        await self._queue.release(PROMPTS, member.value.consumer)
        if drains and self._quiet is not None:
            with suppress(StageTimeout):
                deadline = Deadline(member.name, self.members.timer)
                await deadline.within(bound, "a weight sync", self._quiet())

    async def _alive(self, member: Member[RolloutReplica]) -> None:
        bound = self.members.policy.supervision.timeout_s
        await self.members.call(member, bound, "a heartbeat", lambda replica: replica.alive())

    async def _answers(
        self, member: Member[RolloutReplica], prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """The rollouts of one replica; none if the replica is ejected before.

        A RolloutFault ejects no replica: it would follow its prompt from replica to replica.
        """
        number = member.incarnation

        async def ejected() -> list[Rollout]:
            await self.members.until(lambda: not member.serves(number))
            return []

        try:
            return await race(member.value.generate(prompts, sampling), ejected())
        except RolloutFault:
            raise
        except Exception as error:
            self.members.fail(member, number, error)
            return []


class Evaluators:
    """The pool ``stage``; ``refresh()`` gives the newest weights to its replicas."""

    def __init__(self, stage: RollouterStage, refresh: Callable[[], Awaitable[None]]) -> None:
        self.stage = stage
        self._refresh = refresh

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Answers of one version, the newest when it begins; see RollouterStage.generate.

        It begins anew after a replica was rebuilt or has joined, which then has a later version: as
        often as ``supervision.max_restarts`` allows, and once for each growth and drain.
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
