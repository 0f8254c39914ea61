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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from async_opd.cluster.actor_shell import (
    Remote,
    end_built,
    raise_at_death,
    raise_unless_built,
)
from async_opd.cluster.proxies import QueueProxy, TeacherProxy
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Displaced, ProcessDied, ProcessRestarts, StageError, StageTimeout
from async_opd.core.stages import DEAD, PROMPTS, STALE, TRAINER, rollouts_topic, topics
from async_opd.models.engine_args import Device
from async_opd.processes.events import Event, State
from async_opd.processes.members import Member, MemberSet, Policy, Rebuild
from async_opd.queue.sizes import payloads
from async_opd.waiting.deadline import Deadline
from async_opd.waiting.race import gather_or_cancel, race
from async_opd.waiting.waits import Waits
from async_opd.weight_sync.rendezvous import new_secret
from teachers.endpoint.replica import EndpointReplica
from teachers.protocols import RebuildTeacher, TeacherWeights
from trainer.rank_spec import RankSpec

if TYPE_CHECKING:
    from async_opd.cluster.rollouter_replicas import RollouterActor

Teachers = Mapping[str, Sequence[TeacherProxy | EndpointReplica]]

FOLLOWER = "trainer.build:build_follower"
NO_GPUS = "join machines with GPUs, or raise timeouts.stall_s if they come later"


class SingletonActor(ABC):
    """A stage in one process of its own, or in several."""

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
    """The message queue."""

    remote: Remote
    config: RunConfig

    async def build(self) -> None:
        """See SingletonActor."""
        config = self.config
        limits = (config.queue.max_samples, config.queue.max_mib << 20, config.queue.lease_s)
        args = (topics(config.teachers), *limits, None, (PROMPTS, STALE, DEAD))
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

    async def build(self) -> None:
        """See SingletonActor."""
        self.incarnation += 1
        config = self.config
        sizes = {name: t.batch_size for name, t in config.teachers.items()}
        health = {name: teacher.health for name, teacher in config.teachers.items()}
        hosts = {name: t.host for name, t in config.teachers.items() if t.host is not None}
        tokens = {one.teacher: one.call_tokens for one in payloads(config, self.device)}
        bounds = (sizes, health, self.rebuild, config.supervision, f"scorer#{self.incarnation}")
        bound = config.timeouts.engine_start_s
        args = (self.teachers, self.queue, *bounds, hosts, config.train.batch_size, tokens, bound)
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
class SingletonActors:
    """Supervises them, and rebuilds them before the run goes on from a checkpoint."""

    config: RunConfig
    notify: Callable[[str], None]
    queue: QueueActor
    scorer: ScorerActor
    rollouter: RollouterActor
    trainer: TrainerActor
    waits: Waits

    def __post_init__(self) -> None:
        """Deaths are counted from here on, over all restarts of the trainer."""
        self._step: Callable[[], int] = int
        self._reissue: Callable[[], object] = int  # does nothing
        self._bound = self.config.supervision.timeout_s
        restarted = [self.queue, self.scorer, self.rollouter]
        self.members = self._members("stages", restarted, self._rebuilt)
        self.trainers = self._members(TRAINER, [self.trainer], self._as_new)

    def _members(
        self, name: str, singles: Sequence[SingletonActor], rebuild: Rebuild[SingletonActor]
    ) -> MemberSet[SingletonActor]:
        """A member set that needs every one of its members."""
        bound = self._bound
        policy = Policy[SingletonActor](
            supervision=self.config.supervision,
            serve=lambda member: gather_or_cancel(
                *(raise_at_death(r, bound) for r in member.value.ranks)
            ),
            alive=lambda member: gather_or_cancel(
                *(raise_unless_built(r, bound) for r in member.value.ranks)
            ),
            leave=lambda member: _ended(member, bound),
            displaced=lambda member: _first_displaced(member.value.ranks),
            rebuild=rebuild,
            reached=lambda member: self._step(),
            needed=len(singles),
            start_s=self.config.timeouts.engine_start_s,
        )
        named = {actor.remote.name: actor for actor in singles}
        members = MemberSet(name, named, policy, waits=self.waits)

        def follow(event: Event) -> None:
            self.notify(str(event))
            if event.member == self.queue.remote.name and event.after is State.SERVING:
                self._reissue()
            if event.after is State.GONE:  # ends calls that wait for its restart
                for rank in members[event.member].value.ranks:
                    rank.kill()

        members.listen(follow)
        return members

    async def supervise(
        self, reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        """See async_opd.pipeline.Stages. Raises ProcessDied when the trainer dies."""
        self._step = step
        async with asyncio.TaskGroup() as group:
            self._reissue = lambda: group.create_task(reissue())
            group.create_task(self.members.run())
            group.create_task(self.rollouter.supply())
            group.create_task(self._until_the_trainer_dies())

    async def rebuild_all(self, error: StageError) -> None:
        """Rebuilds all singleton actors after the trainer's death.

        A death or a failure meanwhile counts as one more death of the trainer. Raises the last
        error after too many.
        """
        (trainer,) = self.trainers.all
        self._reissue = int
        self.trainers.fail(trainer, trainer.incarnation, error)
        await self.trainers.mend(trainer)

    async def _until_the_trainer_dies(self) -> None:
        (trainer,) = self.trainers.all
        await self.trainers.watch(trainer)
        error = trainer.failure
        assert isinstance(error, StageError)
        who = "" if error.stage == TRAINER else f"{error.stage}: "
        raise ProcessDied(TRAINER, who + error.cause, error.remedy) from error

    async def _rebuilt(self, member: Member[SingletonActor]) -> SingletonActor:
        """Rebuilds a member in a process that Ray has started already."""
        try:
            await member.value.build()
        except StageError as failed:
            if not isinstance(failed.__cause__, ProcessDied):
                member.value.restart()
            raise
        return member.value

    async def _as_new(self, member: Member[SingletonActor]) -> SingletonActor:
        """Rebuilds the trainer, and replaces all others with it."""
        queue, scorer, rollouter = self.members.all
        try:
            await self.trainer.end(self._bound)
            await self._end(self.rollouter, self.rollouter.stop)
            await self.rollouter.halt_replicas(self._bound)
            await self._end(self.scorer, self.scorer.hand_over)
            close = self.queue.remote.call
            await self._end(self.queue, lambda bound: close("close", timeout_s=bound))
            await self.trainer.placed()  # the others' place is its own: their waits have no bound
            await self.queue.build()
            self.members.replaced(queue, self.queue)
            await self._built_beside(queue)
        except StageError:
            self.trainer.restart()
            raise
        self.members.replaced(scorer, self.scorer)
        self.members.replaced(rollouter, self.rollouter)
        return member.value

    async def _built_beside(self, queue: Member[SingletonActor]) -> None:
        """Builds all others. Raises the queue's failure as soon as the queue fails."""

        async def queue_failure() -> NoReturn:
            await self.members.watch(queue)
            assert queue.failure is not None
            raise queue.failure

        async def others() -> None:
            await self.scorer.build()  # first: it puts teachers to sleep on the trainer's GPUs
            await gather_or_cancel(self.rollouter.build(), self.trainer.build())

        await race(others(), queue_failure())

    async def _end(self, actor: SingletonActor, ending: Callable[[float], Awaitable[Any]]) -> None:
        """Stops its object; restarts its process if that fails, or if it has no object yet."""
        try:
            if await actor.remote.is_built(self._bound):
                await ending(self._bound)
            else:
                actor.remote.restart()
        except ProcessRestarts:
            await end_built(actor.remote, self._bound)
        except ProcessDied:
            return
        except StageError as error:
            self.notify(f"{actor.remote.name} did not end well: {error}")
            actor.remote.restart()


async def _first_displaced(ranks: Sequence[Remote]) -> Displaced | None:
    """The error of the first process that lost its machine, if one did."""
    found = await gather_or_cancel(*(rank.displaced() for rank in ranks))
    return next(filter(None, found), None)


async def _ended(member: Member[SingletonActor], bound: float) -> None:
    """Restarts a process that hangs, or that lives although a call failed; Ray restarts a dead one.

    Otherwise its object would go on beside the next one.
    """
    if isinstance(member.failure, StageTimeout):
        member.value.restart()
    else:
        await gather_or_cancel(*(end_built(rank, bound) for rank in member.value.ranks))
