"""The rollout stage in its actor: it supervises the student's replicas and syncs their weights.

    driver                                     actor <run>/rollouter
    run, generate, report, events ───────────► RollouterStage: members and their states
    snapshot, push ──────────────────────────► BroadcastSync: trainer ──► members
    starts a replica's process ◄── orders ──── a member is to be rebuilt
         └────────── deliver ────────────────► it joins with the newest weights, and serves

Replicas pull prompts and put rollouts themselves: no sample passes this actor. The driver starts
their processes and so owns them: they outlive this actor, and the next one continues with them
(``async_opd.cluster.rollouter_replicas``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from async_opd.cluster import actor_names
from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Displaced, StageError
from async_opd.core.reports import Events, Progress, StageReport, SyncReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import Queue, SamplingSpec
from async_opd.processes.members import Member
from async_opd.queue.sizes import EpisodeBounds
from async_opd.sharing.shared_gpus import SharedGpus, SharingTrainer
from async_opd.sharing.time_sharing import GpuGuests, GpuHost
from async_opd.waiting.deadline import StageCalls, gather_or_cancel
from async_opd.waiting.liveness import answer_s
from async_opd.weight_sync.coordinator import TRIES, BroadcastSync, Snapshot
from async_opd.weight_sync.freshness import Freshness
from async_opd.weight_sync.layout import WeightMeta
from async_opd.weight_sync.sync_group import WeightReceiver, WeightSender
from rollouter.orders import Order, Orders
from rollouter.stage import Evaluators, RollouterStage, RolloutReplica


class SyncedTrainer(WeightSender, SharingTrainer, Protocol):
    """The trainer in its actor."""


class Student(RolloutReplica, WeightReceiver, GpuHost, Protocol):
    """A student's replica in its actor."""

    name: str

    async def displaced(self) -> Displaced | None:
        """The error of a replica whose machine is lost."""

    async def stop_evaluation(self) -> None:
        """Ends the answers to an evaluation's prompts."""

    async def write_weights(self, directory: str, sent: dict[str, str]) -> list[str]:
        """Writes its newest weights as a model's, or names the tensors with other digests."""
        ...

    def kill(self) -> None:
        """Ends its process."""


@dataclass(frozen=True)
class StartedReplica:
    """A replica whose engine is ready; ``workers`` are its ranks in a weight sync."""

    student: Student
    workers: int


Replicas = Sequence[StartedReplica | None]
"""Those of all pools, by their index; None for those without a place in the cluster."""


@dataclass(frozen=True)
class Predecessor:
    """The state that an earlier actor of the stage left; empty without one.

    ``newest`` is the snapshot that it may have been pushing. ``rebuilds`` counts the replicas that
    were rebuilt before; ``report`` includes them.

    ``behind``: some replica may have older weights than the newest ones, and so it may with a
    ``newest`` snapshot. No replica takes or answers prompts then before the first push: that of
    ``run`` if ``newest`` is known, else the driver's.
    """

    newest: Snapshot | None = None
    rebuilds: int = 0
    behind: bool = False


async def build_rollouter(
    config: RunConfig,
    replicas: Replicas,
    queue: Queue,
    trainer: SyncedTrainer,
    teachers: GpuGuests,
    bundles: GpuBundles,
    before: Predecessor,
) -> RollouterService:
    """The actor's object. It begins with the locks of all shared GPUs."""
    service = RollouterService(config, replicas, queue, trainer, teachers, bundles, before)
    await service.gpus.acquire()
    return service


def _freshness(config: RunConfig) -> Freshness | None:
    sync = config.sync
    return Freshness(sync.verify_every, sync.on_wrong_weights) if sync.verify_every else None


class RollouterService:
    """Implements ``async_opd.core.stages.Rollouter``, and the weight sync to the replicas."""

    def __init__(
        self,
        config: RunConfig,
        replicas: Replicas,
        queue: Queue,
        trainer: SyncedTrainer,
        teachers: GpuGuests,
        bundles: GpuBundles,
        before: Predecessor,
    ) -> None:
        """``run`` expects the locks of ``gpus`` to be held."""
        self.orders = Orders[StartedReplica]()
        self._current = asyncio.Event()
        if before.newest is None and not before.behind:
            self._current.set()
        rollouts = len(replicas) - config.eval.max_replicas
        self._bundles = bundles
        self.stage = self._stage_of("rollout", replicas[:rollouts], 0, config, queue)
        self.evaluators: Evaluators | None = None
        if own := replicas[rollouts:]:
            evaluating = self._stage_of("eval", own, rollouts, config, queue)
            self.evaluators = Evaluators(evaluating, self._refresh)
            self.evaluators.stage.members.listen(self.stage.note)
            self.evaluators.stage.members.waits = self.stage.members.waits
        self._broadcast = self._broadcast_of(config, replicas, trainer, before.newest)
        self.gpus = SharedGpus(config, self._hosts, self.progress, trainer, teachers)
        self._rebuilds_before = before.rebuilds
        self._work: asyncio.Task[None] | None = None
        self._calls = StageCalls("rollouter")

    def _stage_of(
        self,
        pool: str,
        replicas: Replicas,
        first: int,
        config: RunConfig,
        queue: Queue,
    ) -> RollouterStage:
        """The stage of a pool, whose replicas are those of the run from the number ``first`` on."""
        named = (actor_names.in_pool(pool, index).name for index in range(len(replicas)))
        return RollouterStage(
            {
                name: None if one is None else one.student
                for name, one in zip(named, replicas, strict=True)
            },
            queue,
            partial(self._rebuilt, first),
            config.supervision,
            answer_s=answer_s(config.timeouts.stall_s, depth=2),
            current=self._current,
            pool=pool,
            start_s=config.timeouts.engine_start_s,
            displaced=lambda member: cast(Student, member.value).displaced(),
            places=self._bundles.places(config, pool),
            quiet=lambda: self._broadcast.quiet(),
            episodes=EpisodeBounds.of(config),
        )

    def _broadcast_of(
        self,
        config: RunConfig,
        replicas: Replicas,
        trainer: SyncedTrainer,
        newest: Snapshot | None,
    ) -> BroadcastSync:
        """The weight sync from the trainer to the replicas."""
        return BroadcastSync(
            trainer,
            self.stage.members,
            [replica.workers if replica else 0 for replica in replicas],
            on_sync=config.async_.on_sync,
            timeout_s=config.sync.timeout_s,
            seconds_per_byte=config.sync.seconds_per_byte,
            rolling=config.sync.rolling,
            tries=TRIES,
            newest=newest,
            freshness=_freshness(config),
            evaluators=self.evaluators.stage.members if self.evaluators else None,
        )

    async def run(self) -> None:
        """See Rollouter. A second call joins the first."""
        self._work = self._work or asyncio.create_task(self._run(), name="rollouter")
        await self._work

    async def _run(self) -> None:
        """Pushes the newest weights, if an earlier actor may have died during a sync.

        Replicas are supervised meanwhile: the push may wait long for teachers on their GPUs.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.stage.run())
            if self.evaluators is not None:
                group.create_task(self.evaluators.stage.run())
            group.create_task(self.gpus.run())
            if self._broadcast.newest is not None and not self._current.is_set():
                await self._push()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> Coroutine[Any, Any, list[Rollout]]:
        """See Rollouter."""
        answers = self.evaluators or self.stage
        return self._calls.run(answers.generate(prompts, sampling))

    async def progress(self) -> Progress:
        """See Rollouter."""
        if self.evaluators is None:
            return await self.stage.progress()
        stages = self.stage, self.evaluators.stage
        one, other = await gather_or_cancel(*(stage.progress() for stage in stages))
        unresponsive = one.unresponsive + other.unresponsive
        return Progress(one.tokens + other.tokens, one.most + other.most, unresponsive)

    def events(self, seen: int, wait: bool = True) -> Coroutine[Any, Any, Events]:
        """See Rollouter."""
        return self.stage.events(seen, wait)

    async def report(self) -> StageReport:
        """See Rollouter."""
        found = await self.stage.report()
        if self.evaluators is not None:
            found = await self.evaluators.added_to(found)
        rebuilds = found.gauges["rebuilds"] + self._rebuilds_before
        return replace(found, gauges={**found.gauges, "rebuilds": rebuilds})

    async def shutdown(self) -> None:
        """Ends supervision and the driver's calls, a push too; the replicas go on."""
        await self._calls.stop(self._work)

    # ── weights ────────────────────────────────────────────────────────────────────────────────

    def connect(self) -> Coroutine[Any, Any, None]:
        """See BroadcastSync.connect."""
        return self._calls.run(self._broadcast.connect())

    def snapshot(self, version: int) -> Coroutine[Any, Any, WeightMeta]:
        """See BroadcastSync.snapshot. Returns the metadata of its weights."""
        return self._calls.run(self._snapshot(version))

    async def _snapshot(self, version: int) -> WeightMeta:
        async with self.gpus.snapshot():
            await self._broadcast.snapshot(version)
        assert self._broadcast.newest is not None
        return self._broadcast.newest[1]

    def push(self) -> Coroutine[Any, Any, SyncReport]:
        """See BroadcastSync.push."""
        return self._calls.run(self._push())

    async def _push(self) -> SyncReport:
        async with self.gpus.push():
            report = await self._broadcast.push()
        self._current.set()
        return report

    # ── replicas ───────────────────────────────────────────────────────────────────────────────

    def replica_orders(self, seen: int) -> Coroutine[Any, Any, tuple[Order, ...]]:
        """See Orders.after."""
        return self.orders.after(seen)

    async def deliver(self, number: int, answer: StartedReplica | StageError) -> None:
        """See Orders.answer."""
        self.orders.answer(number, answer)

    async def _refresh(self) -> None:
        async with self.gpus.refresh():
            await self._broadcast.refresh_evaluators()

    async def _rebuilt(self, first: int, member: Member[Student]) -> Student:
        """A new replica with the newest weights; see RollouterStage.

        ``first`` is the index among all replicas of its pool's first one.
        """
        index = first + member.index
        if member.value is not None:
            member.value.kill()
        async with self.gpus.rebuild:
            replica = await self.orders.replica(index)
            try:
                async with self.gpus.join():
                    await self._broadcast.rejoin(index, replica.student, replica.workers)
            except BaseException:
                replica.student.kill()
                raise
        return replica.student

    def _hosts(self) -> Mapping[str, GpuHost]:
        return {m.name: cast(GpuHost, m.value) for m in self.stage.members.serving}
