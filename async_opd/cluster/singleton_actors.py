"""The singleton actors: queue, scorer, rollouter, trainer. Each can be rebuilt after its death.

queue      rebuilt, empty; the ledger issues the prompts in flight again
scorer     rebuilt; the rollouts of its leases go back to their topics
rollouter  rebuilt, over the same replicas; all of them get the newest weights once more
trainer    all ranks are rebuilt after the death of one, and the run goes on from a checkpoint
           (async_opd.training); all others are replaced, after the student replicas stop
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from async_opd.cluster import actor_names
from async_opd.cluster.actor_factory import ActorFactory
from async_opd.cluster.actor_names import run_name
from async_opd.cluster.payloads.stores import NodeStores
from async_opd.cluster.placement.gpu_bundles import PoolPlaces
from async_opd.cluster.proxies import QueueProxy, TeacherProxy
from async_opd.cluster.remote import RETRY_S, Remote
from async_opd.config.run_config import RunConfig
from async_opd.core.batch import MESSAGE_BYTES
from async_opd.core.errors import Displaced, ProcessRestarts, StageError
from async_opd.core.stages import DEAD, PROMPTS, STALE, TRAINER, rollouts_topic, topics
from async_opd.models.engine_args import Device, trainer_env
from async_opd.processes.own_settings import KEEPS
from async_opd.queue.sizes import EpisodeBounds, call_tokens
from async_opd.waiting.deadline import Bound, Deadline, gather_or_cancel
from async_opd.weight_sync.rendezvous import new_secret
from teachers.endpoint.replica import EndpointReplica
from teachers.replica_slots import RebuildTeacher, TeacherWeights
from trainer.rank_group import RankSpec

Teachers = Mapping[str, Sequence[TeacherProxy | EndpointReplica | None]]
"""The replicas of each teacher; None for those without a place in the cluster."""

FOLLOWER = "trainer.build:build_follower"
NO_GPUS = "join machines with GPUs, or raise timeouts.stall_s if they come later"


class SingletonActor(ABC):
    """A stage in one separate process, or in several."""

    remote: Remote

    @property
    def ranks(self) -> tuple[Remote, ...]:
        """All of its processes, in the order of ranks."""
        return (self.remote,)

    @property
    def start_s(self) -> float | None:
        """See Remote.start_s; that of the slowest rank."""
        return max((rank.start_s for rank in self.ranks if rank.start_s is not None), default=None)

    @abstractmethod
    async def build(self) -> None:
        """Builds its object, in place of an earlier one."""

    def restart(self) -> None:
        """Restarts every process, also one that has an object or still builds one."""
        for rank in self.ranks:
            rank.restart()


@dataclass
class QueueActor(SingletonActor):
    """The message queue; ``stores`` is that of payloads, None where these travel by value."""

    remote: Remote
    config: RunConfig
    stores: NodeStores | None = None

    @classmethod
    async def start(cls, actor_factory: ActorFactory) -> QueueActor:
        """Starts its process. Calls to it wait until it is built: see ``build``."""
        config, stores = actor_factory.config, None
        if actor_factory.stored_from is not None:
            bounds = (config.queue.lease_s, config.timeouts.engine_start_s)
            given = (run_name(config), actor_factory.env)
            stores = NodeStores(*given, *bounds, config.timeouts.request_s)
        remote = await actor_factory.create(actor_names.QUEUE, restarts=True)
        actor_factory.images = QueueProxy(remote)
        return cls(remote, config, stores)

    async def build(self) -> None:
        """See SingletonActor."""
        config = self.config
        limits = (config.queue.max_samples, config.queue.max_mib << 20, config.queue.lease_s)
        kept = (PROMPTS, STALE, DEAD)
        args = (topics(config.teachers), *limits, None, kept, MESSAGE_BYTES, self.stores)
        path = "async_opd.queue.message_queue:MessageQueue"
        await self.remote.build(path, args, config.timeouts.engine_start_s)


@dataclass
class TrainerActor(SingletonActor):
    """The trainer. ``build`` puts it at step 0, with the student's first weights.

    ``remote`` is its first rank, which dispatches work to the others; ``args`` have the queue, from
    which all of them fetch samples, in the third place.
    """

    remote: Remote
    config: RunConfig
    device: Device
    path: str
    args: tuple[Any, ...]
    others: tuple[Remote, ...] = ()

    @classmethod
    async def start(cls, actor_factory: ActorFactory, queue: QueueProxy | None) -> TrainerActor:
        """Builds its ranks, each after the engines on its GPU; no queue: there are none."""
        config, device = actor_factory.config, actor_factory.device
        first, *others = ranks = [
            await actor_factory.create(
                actor_names.trainer(rank),
                env={**trainer_env(device, config.train.threads), KEEPS: "1"},
                gpus=int(device == "cuda"),
                bundle=("train", rank),
                restarts=True,
            )
            for rank in range(config.train.ranks)
        ]
        factory = actor_factory.factories.trainer
        config = config.model_copy(update={"run_dir": actor_factory.run_dir})
        args = (config, device, queue, *factory.extra)
        trainer = cls(first, config, device, factory.path, args, tuple(others))
        hosts = range(0 if queue is None else len(ranks))
        with actor_factory.waiting(first.name):
            await actor_factory.build_after_guests("train", hosts, trainer.build, queue)
        return trainer

    @property
    def ranks(self) -> tuple[Remote, ...]:
        """All ranks, in their order."""
        return (self.remote, *self.others)

    async def build(self) -> None:
        """See SingletonActor and ``placed``. Ranks are built together: each waits for all."""
        await self.placed()
        bound = self.config.timeouts.engine_start_s
        if not self.others:
            await self.remote.build(self.path, self.args, bound)
            return
        first, *specs = await self._rank_specs(bound)
        args, queue = (*self.args, first, self.others), self.args[2]
        await gather_or_cancel(
            self.remote.build(self.path, args, bound),
            *(
                other.build(FOLLOWER, (self.config, self.device, spec, queue), bound)
                for other, spec in zip(self.others, specs, strict=True)
            ),
        )

    async def placed(self) -> None:
        """Waits until all ranks have GPUs. StageTimeout after ``timeouts.stall_s``."""
        placed = gather_or_cancel(*(rank.placed() for rank in self.ranks))
        bound = self.config.timeouts.stall_s
        await Deadline(TRAINER).within(bound, "waiting for its GPUs", placed, NO_GPUS)

    async def _rank_specs(self, bound: float) -> list[RankSpec]:
        """A spec for each rank; their rendezvous is the socket of the first one."""
        host, port, listener = await self.remote.listen(self.config.cluster, bound)
        collective_s = self.config.timeouts.collective_s
        spec = RankSpec(0, len(self.ranks), host, port, collective_s, bound, new_secret(), listener)
        others = (replace(spec, rank=i, listener=None) for i in range(1, len(self.ranks)))
        return [spec, *others]

    async def end(self, bound: float) -> None:
        """Restarts every process with an object: it may hang in a collective."""
        await gather_or_cancel(*(end_built(rank, bound) for rank in self.ranks))


@dataclass
class ScorerActor(SingletonActor):
    """The scoring stage. Each rebuild gets a new name, and releases the leases of earlier ones."""

    remote: Remote
    config: RunConfig
    teachers: Teachers
    queue: QueueProxy
    rebuild: RebuildTeacher
    device: Device
    incarnation: int = 0
    released: int = 1
    weights: dict[str, TeacherWeights] = field(default_factory=dict)
    """The newest weights of ``self`` teachers, for a rebuilt stage and its replicas."""

    @classmethod
    async def start(
        cls, actor_factory: ActorFactory, remote: Remote, teachers: Teachers, queue: QueueProxy
    ) -> ScorerActor:
        """Builds the stage in ``remote``, a process that waits for it."""
        config, rebuild = actor_factory.config, _RebuildTeacher(actor_factory.anew())
        scorer = cls(remote, config, teachers, queue, rebuild, actor_factory.device)
        with actor_factory.waiting(remote.name):
            await scorer.build()
        actor_factory.stages.append(remote)
        return scorer

    async def build(self) -> None:
        """See SingletonActor."""
        self.incarnation += 1
        config = self.config
        sizes = {name: t.batch_size for name, t in config.teachers.items()}
        health = {name: teacher.health for name, teacher in config.teachers.items()}
        hosts = {name: t.host for name, t in config.teachers.items() if t.host is not None}
        tokens = call_tokens(config, self.device)
        bounds = (sizes, health, self.rebuild, config.supervision, f"scorer#{self.incarnation}")
        bound = config.timeouts.engine_start_s
        calls = (hosts, config.train.batch_size, tokens, bound, EpisodeBounds.of(config))
        args = (self.teachers, self.queue, *bounds, *calls)
        await self.remote.build("teachers.stage:ScorerStage", args, bound)
        for incarnation in range(self.released, self.incarnation):
            for teacher in self.teachers:
                await self.queue.release(rollouts_topic(teacher), f"scorer#{incarnation}")
        self.released = self.incarnation
        if hosts:
            await self.remote.call("rest", timeout_s=config.timeouts.request_s + self._sleep_s)
        for name, weights in self.weights.items():
            await self.remote.call("load", name, weights)

    async def hand_over(self, bound: float) -> None:
        """Stops scoring; the next stage gets the current replicas, rebuilt ones too.

        ``bound`` is extended by ``_sleep_s``, after which the stage still hands over.
        """
        found = await self.remote.call("hand_over", timeout_s=bound + self._sleep_s)
        self.teachers, self.rebuild = found

    @property
    def _sleep_s(self) -> float:
        """Seconds after which the stage ends colocated teachers that do not go to sleep."""
        colocated = [t for t in self.config.teachers.values() if t.host is not None]
        return max((teacher.health.timeout_s for teacher in colocated), default=0.0)


@dataclass
class _RebuildTeacher:
    """Rebuilds teachers' replicas in the scoring stage's process, which owns them."""

    actor_factory: ActorFactory

    async def __call__(self, teacher: str, index: int, old: TeacherProxy | None) -> TeacherProxy:
        """See teachers.replica_slots.RebuildTeacher."""
        if old is not None:
            old.kill()
        replica = await self.actor_factory.teacher(teacher, index)
        assert isinstance(replica, TeacherProxy)  # servers are probed, not rebuilt
        return replica

    async def displaced(self, old: TeacherProxy) -> Displaced | None:
        """See teachers.replica_slots.RebuildTeacher."""
        return await old.displaced()

    def places(self, teacher: str) -> PoolPlaces | None:
        """See teachers.replica_slots.RebuildTeacher."""
        return self.actor_factory.bundles.places(self.actor_factory.config, f"teachers.{teacher}")

    async def close(self) -> None:
        """See teachers.replica_slots.RebuildTeacher."""
        await self.actor_factory.close()


async def end_built(remote: Remote, bound: float) -> None:
    """Restarts a process that has an object, hangs, or gives no answer within the bound.

    Ray's error is the same for a process that it restarts and for one that cannot be reached for a
    while: the next answer shows which.
    """
    with suppress(StageError, TimeoutError):
        async with Bound(bound):
            while True:
                try:
                    if not await remote.is_built(bound):
                        return
                    break
                except ProcessRestarts:
                    await asyncio.sleep(RETRY_S)
    remote.restart()
