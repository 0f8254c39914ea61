"""Builds the cluster of a run: all of its actors, at the same time.

queue ─┬─ student/0 … student/N-1     rollouter
       ├─ <teacher>/0 … per teacher   scorer
       └─ trainer, trainer/1 … its ranks (then: rendezvous of trainer and students)

A process whose GPUs others share is built after these, which sleep then.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from async_opd.checkpoint.checkpointer import state_s
from async_opd.cluster import actor_names
from async_opd.cluster.actor_factory import ActorFactory, Factories, discard
from async_opd.cluster.launch_parts import ray_processes
from async_opd.cluster.placement.by_importance import Placement, any_node
from async_opd.cluster.placement.gpu_bundles import names
from async_opd.cluster.placement.nodes import gpu_nodes
from async_opd.cluster.proxies import (
    QueueProxy,
    RollouterProxy,
    ScorerProxy,
    StudentProxy,
    TrainerProxy,
)
from async_opd.cluster.remote import Remote
from async_opd.cluster.rollouter_replicas import RollouterActor
from async_opd.cluster.singleton_actors import QueueActor, ScorerActor, TrainerActor
from async_opd.cluster.supervision import SingletonActors
from async_opd.cluster.watching import ClusterWatch
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Displaced, StageError, first_cause
from async_opd.core.stages import WeightSync
from async_opd.models.engine_args import Device
from async_opd.queue.sizes import stored_from
from async_opd.waiting.deadline import Deadline, race
from async_opd.waiting.waits import Waits

Engine = TypeVar("Engine")

STAGES = "all stages of the run to start"
"""It lasts as long as many waits, each of which may be short."""


@dataclass(frozen=True)
class LaunchedStages:
    """The stages that the pipeline calls."""

    queue: QueueProxy
    rollouter: RollouterProxy
    scorer: ScorerProxy
    trainer: TrainerProxy
    sync: WeightSync
    singletons: SingletonActors
    watch: ClusterWatch

    async def watched(self, work: Awaitable[None]) -> None:
        """Awaits the work. HeadLost when the head of the cluster is lost meanwhile."""
        await race(self.watch.run(), work)

    async def supervise(
        self, reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        """See Stages. Raises HeadLost when the head of the cluster is lost."""
        await self.watched(self.singletons.supervise(reissue, step))

    async def rewind(self, error: StageError) -> None:
        """After the trainer's death, or for a rollback: rebuilds all stages, keeps the engines.

        The trainer then has the student's first weights. Raises if it died too often. A caller
        watches the cluster: see ``watched``.
        """
        await self.singletons.rebuild_all(error)

    @property
    def verified_version(self) -> int | None:
        """The newest weight version that was compared with the trainer; None before the first."""
        verified = self.singletons.rollouter.verified
        return None if verified is None else verified[0]

    async def write_verified(self, directory: str) -> tuple[str, str]:
        """See RollouterActor.write_verified. Supervision ends before; ``rewind`` begins it again.

        An engine that writes answers no probe, and would be killed.
        """
        rollouter = self.singletons.rollouter
        with suppress(StageError):  # a dead actor supervises nothing, either
            await rollouter.stop(self.singletons.config.supervision.timeout_s)
        return await rollouter.write_verified(directory, self.trainer.state_s)

    async def save_early(self, directory: str) -> None:
        """Saves the student of a run that ends before its time. Raises what the trainer raises.

        Engines on the GPUs of several ranks, which gather their shards there, finish no response
        before: that may take longer than the run has left.
        """
        config, rollouter = self.singletons.config, self.singletons.rollouter
        if config.rollout.host is None or config.train.ranks == 1:
            await self.trainer.save(directory)
            return
        bound = config.supervision.timeout_s
        with suppress(StageError):  # its death may be why the run ends; the engines sleep anyway
            await rollouter.stop(bound)
        await rollouter.halt_replicas(bound)
        await race(self.trainer.save(directory), self._turn())

    async def _turn(self) -> None:
        """Gives the trainer its turn, which no other task does any more. Ends with an error only.

        A scoring phase on these GPUs continues after its caller exits: its teachers sleep first.
        """
        await self.trainer.wait_for_work("rollout")
        teachers = self.singletons.config.teachers.values()
        if any(teacher.host == "rollout" for teacher in teachers):
            with suppress(StageError):  # the scorer may be what died
                await self.scorer.wait_asleep("rollout")
        await self.trainer.take_turn("rollout")
        await asyncio.Event().wait()  # the save is what is waited for, and what has a bound


@asynccontextmanager
async def launch(
    config: RunConfig,
    *,
    device: Device,
    eos_ids: tuple[int, ...],
    factories: Factories | None = None,
    notify: Callable[[str], None] = discard,
    waits: Waits | None = None,
) -> AsyncIterator[LaunchedStages]:
    """Starts Ray and all actors; ends all of their processes at the end.

    ``notify`` gets a line for each event of a member: a death, a restart. ``waits`` names what is
    waited for; by default to ``notify``, too.

    Raises EngineStartError with the name of the first actor that did not start.
    """
    given = (device, eos_ids, factories or Factories(), notify)
    async with ray_processes(config, *given, waits=waits) as (actor_factory, track):
        hosts = {str(teacher.host) for teacher in config.teachers.values() if teacher.host}
        reserved = (actor_factory.bundles, hosts, notify, actor_factory.waits, gpu_nodes, names)
        compare = actor_factory.compare_node or any_node
        watch = ClusterWatch(notify, Placement(*reserved, compare))
        with actor_factory.waits.on(STAGES, config.timeouts.engine_start_s, " a process"):
            stages = await race(watch.run(), _started(actor_factory, watch))
        track()
        gc.collect()  # garbage that is frozen is never freed
        gc.freeze()  # a later collection of all that imports left would stop the event loop
        try:
            yield stages
        finally:
            gc.unfreeze()


async def _built_last(actor_factory: ActorFactory, queue: QueueActor) -> tuple[Remote, Remote]:
    """The processes of scorer and rollouter, which start while the engines do.

    Ray starts a few processes at a time: those of the engines are asked for before the queue is up.
    """
    with actor_factory.waiting(queue.remote.name):
        await queue.build()
    scorer = await actor_factory.create(actor_names.SCORER, restarts=True)
    return scorer, await actor_factory.create(actor_names.ROLLOUTER, restarts=True)


async def _started(actor_factory: ActorFactory, watch: ClusterWatch) -> LaunchedStages:
    """All stages. Machines that are lost before all are there make the start begin again.

    At most ``supervision.max_restarts`` times; it waits for its GPUs as the first start does.
    """
    config, bundles, waits = actor_factory.config, actor_factory.bundles, actor_factory.waits
    bound_s = config.timeouts.engine_start_s + config.cluster.wait_s
    for _ in range(config.supervision.max_restarts):
        try:
            return await bundles.while_ranks_are_placed(_build(actor_factory, watch))
        except StageError as error:
            lost = error if isinstance(error, Displaced) else await actor_factory.displaced()
            if lost is None:
                raise
            why = "" if lost is error else f" ({error.stage}: {error.cause})"
            again = f"the start begins again: {lost.stage}: {lost.cause}{why}"
            actor_factory.notify(f"cluster: {again}")
        with waits.on("the processes to end", config.timeouts.shutdown_s):
            await actor_factory.end()
        what = "waiting for other places for its processes"
        remedy = "join machines, or raise cluster.wait_s if they come later"
        with waits.on("GPUs", bound_s):
            await Deadline("cluster").within(bound_s, what, bundles.placed(), remedy)
    return await bundles.while_ranks_are_placed(_build(actor_factory, watch))


async def _if_placed(
    actor_factory: ActorFactory, pool: str, start: Coroutine[Any, Any, Engine]
) -> Engine | None:
    """The engine; None if its machine is lost meanwhile: its pool starts it elsewhere.

    One that shares GPUs raises Displaced, since others wait for it.
    """
    places = actor_factory.bundles.places(actor_factory.config, pool)
    try:
        return await start
    except Displaced as error:
        if places is None or places.shared:
            raise
        actor_factory.notify(f"{error.stage}: it is started later: {error.cause}")
        return None


async def _build(actor_factory: ActorFactory, watch: ClusterWatch) -> LaunchedStages:
    config = actor_factory.config
    actor_factory.stored_from = await asyncio.to_thread(stored_from, config, actor_factory.device)
    queue_actor = await QueueActor.start(actor_factory)
    queue = QueueProxy(queue_actor.remote)
    if_placed = partial(_if_placed, actor_factory)
    pool_of = partial(actor_names.pool_of_student, config)
    try:
        async with asyncio.TaskGroup() as group:
            last = group.create_task(_built_last(actor_factory, queue_actor))
            most = config.rollout.max_replicas
            hosted = 0 if config.rollout.host is None else most
            student_tasks = [
                group.create_task(if_placed(pool_of(index)[0], actor_factory.student(index, queue)))
                for index in range(hosted, most + config.eval.max_replicas)
            ]
            teacher_tasks = {
                name: [
                    group.create_task(
                        if_placed(f"teachers.{name}", actor_factory.teacher(name, at))
                    )
                    for at in range(teacher.max_replicas)
                ]
                for name, teacher in config.teachers.items()
                if teacher.host is None
            }
            trainer_task = group.create_task(TrainerActor.start(actor_factory, queue))
    except ExceptionGroup as errors:
        raise first_cause(errors) from errors
    students: list[StudentProxy | None] = [task.result() for task in student_tasks]
    teachers: dict[str, list[Any]] = {
        name: [task.result() for task in tasks] for name, tasks in teacher_tasks.items()
    }
    for pool, by_index in actor_factory.colocated.items():
        guests = [guest for _, guest in sorted(by_index.items())]  # they fell asleep in any order
        if pool == "rollout":
            students = [*cast(list[StudentProxy], guests), *students]
        else:
            teachers[pool.removeprefix("teachers.")] = guests
    training = trainer_task.result()
    trainer = TrainerProxy(training.remote, await asyncio.to_thread(state_s, config))
    of_scorer, of_rollouter = last.result()
    scoring = await ScorerActor.start(actor_factory, of_scorer, teachers, queue)
    scorer = ScorerProxy(scoring.remote)
    rollouts = await RollouterActor.start(
        actor_factory, of_rollouter, students, queue, trainer, scorer
    )
    rollouts.refresh_teachers(scoring.weights)
    stages = (queue_actor, scoring, rollouts, training)
    return LaunchedStages(
        queue,
        rollouts.proxy,
        scorer,
        trainer,
        rollouts,
        SingletonActors(config, actor_factory.notify, *stages, actor_factory.waits),
        watch,
    )
