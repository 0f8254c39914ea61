"""Builds the cluster of a run: one actor per box, all of them at the same time.

queue ─┬─ student/0 … student/N-1     rollouter
       ├─ <teacher>/0 … per teacher   scorer
       └─ trainer, trainer/1 … its ranks (then: rendezvous of trainer and students)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray

from async_opd.checkpoint.store import Checkpoints
from async_opd.checks.resources import pools
from async_opd.cluster.actor_factory import ActorFactory, Factories, discard
from async_opd.cluster.proxies import (
    QueueProxy,
    ScorerProxy,
    StudentProxy,
    TrainerProxy,
)
from async_opd.cluster.session import ray_session
from async_opd.cluster.singleton_actors import SingletonActors
from async_opd.config.run_config import RunConfig
from async_opd.config.teachers import SelfTeacher
from async_opd.core.errors import ConfigError, Problem, ProcessDied, first_cause
from async_opd.core.liveness import answer_s
from async_opd.core.stages import TeacherScorer, WeightSync
from async_opd.models.engine_args import Device
from async_opd.processes.members import Member
from async_opd.weight_sync.coordinator import BroadcastSync
from async_opd.weight_sync.teacher_refresh import RefreshingSync, WeightCopies
from rollouter.stage import RollouterStage
from teachers.protocols import TeacherWeights
from teachers.time_sharing import GpuHost, GpuTimeSharing, LockedSync, SharedLock, TimeSharingScorer

Gpus = AbstractAsyncContextManager[None]
"""Entered by whoever needs the GPUs of a pool; nobody else has them meanwhile."""


@dataclass(frozen=True)
class LaunchedStages:
    """Everything the pipeline talks to."""

    queue: QueueProxy
    rollouter: RollouterStage
    scorer: TeacherScorer
    trainer: TrainerProxy
    sync: WeightSync
    broadcast: BroadcastSync
    singletons: SingletonActors

    async def supervise(
        self, reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        """See async_opd.pipeline.Stages."""
        await self.singletons.supervise(reissue, step)

    async def rewind(self, error: ProcessDied) -> None:
        """After the trainer died: all stages are as new, and the engines as they are.

        The trainer has the student's first weights. Raises if the trainer died too often.
        """
        await self.rollouter.halt()
        await self.singletons.rebuild_all(error)
        await self.broadcast.forget()


@asynccontextmanager
async def launch(
    config: RunConfig,
    *,
    device: Device,
    eos_ids: tuple[int, ...],
    factories: Factories | None = None,
    notify: Callable[[str], None] = discard,
) -> AsyncIterator[LaunchedStages]:
    """Starts Ray and all actors; ends every one of their processes on the way out.

    ``notify`` gets a line about everything that died and was restarted.

    Raises EngineStartError naming the first box that did not come up.
    """
    async with ray_session(config) as reaper:
        if device == "cuda":
            _enough_gpus(config)
        actor_factory = ActorFactory(config, device, eos_ids, factories or Factories(), notify)
        try:
            stages = await _build(actor_factory)
            if reaper is not None:
                reaper.track_descendants()
            yield stages
        finally:
            await actor_factory.close()


async def _build(actor_factory: ActorFactory) -> LaunchedStages:
    config = actor_factory.config
    queue_actor = await actor_factory.queue()
    queue = QueueProxy(queue_actor.remote)
    try:
        async with asyncio.TaskGroup() as group:
            student_tasks = [
                group.create_task(actor_factory.student(index, queue))
                for index in range(config.rollout.replicas)
            ]
            teacher_tasks = {
                name: [
                    group.create_task(actor_factory.teacher(name, index))
                    for index in range(teacher.replicas)
                ]
                for name, teacher in config.teachers.items()
                if teacher.host is None
            }
            trainer_task = group.create_task(actor_factory.trainer(queue))
    except ExceptionGroup as errors:
        raise first_cause(errors) from errors
    students = [task.result() for task in student_tasks]
    teachers = {name: [task.result() for task in tasks] for name, tasks in teacher_tasks.items()}
    teachers |= {
        name: list(colocated.values()) for name, colocated in actor_factory.colocated.items()
    }
    training = trainer_task.result()
    trainer = TrainerProxy(training.remote)
    gpus = asyncio.Lock()
    rebuilding = _rebuilding(config, gpus)
    rollouter, broadcast = await _rollouts(actor_factory, queue, trainer, students, rebuilding)
    scoring = await actor_factory.scorer(teachers, queue)
    scorer = ScorerProxy(scoring.remote)
    synced = _refreshing(actor_factory, broadcast, trainer, scorer, scoring.weights)
    turns = _turns(config, scorer, rollouter, trainer, gpus)
    return LaunchedStages(
        queue,
        rollouter,
        TimeSharingScorer(scorer, list(turns.values())) if turns else scorer,
        trainer,
        LockedSync(synced, gpus) if "rollout" in turns else synced,
        broadcast,
        SingletonActors(config, actor_factory.notify, queue_actor, scoring, training),
    )


def _turns(
    config: RunConfig,
    scorer: ScorerProxy,
    rollouter: RollouterStage,
    trainer: TrainerProxy,
    gpus: asyncio.Lock,
) -> dict[str, GpuTimeSharing]:
    """One for each pool that shares its GPUs with teachers; ``gpus`` are the rollout pool's."""
    hosts: dict[str, Callable[[], Mapping[str, GpuHost]]] = {
        "rollout": lambda: {m.name: cast(GpuHost, m.value) for m in rollouter.members.serving},
        "train": lambda: {"trainer": trainer},
    }
    shared = {teacher.host for teacher in config.teachers.values() if teacher.host is not None}
    bound = config.timeouts.request_s
    locks = {"rollout": gpus, "train": asyncio.Lock()}
    return {
        name: GpuTimeSharing(name, hosts[name], scorer, locks[name], sleep_timeout_s=bound)
        for name in sorted(shared)
    }


def _rebuilding(config: RunConfig, gpus: asyncio.Lock) -> Gpus:
    """What student replicas that are built again hold, several at once.

    Nothing where no teacher shares their GPUs.
    """
    shared = any(teacher.host == "rollout" for teacher in config.teachers.values())
    return SharedLock(gpus) if shared else nullcontext()


async def _rollouts(
    actor_factory: ActorFactory,
    queue: QueueProxy,
    trainer: TrainerProxy,
    students: list[StudentProxy],
    gpus: Gpus,
) -> tuple[RollouterStage, BroadcastSync]:
    """The pool of student replicas, and the weight sync to those of its members that serve."""
    config = actor_factory.config
    rebuild = _RebuildStudent(actor_factory, queue, gpus)
    rollouter = RollouterStage(
        {student.name: student for student in students},
        queue,
        rebuild,
        config.supervision,
        answer_s=answer_s(config.timeouts.stall_s, depth=2),
    )
    rollouter.members.listen(lambda event: actor_factory.notify(str(event)))
    rebuild.sync = sync = BroadcastSync(
        trainer,
        rollouter.members,
        await asyncio.gather(*(student.ready() for student in students)),
        on_sync=config.async_.on_sync,
        timeout_s=config.sync.timeout_s,
        rolling=config.sync.rolling,
        tries=config.sync.tries,
    )
    await sync.connect()
    return rollouter, sync


def _refreshing(
    actor_factory: ActorFactory,
    sync: WeightSync,
    trainer: TrainerProxy,
    scorer: ScorerProxy,
    newest: dict[str, TeacherWeights],
) -> WeightSync:
    """The sync, which also refreshes teachers that are the student itself.

    ``newest`` gets what each has, for a scoring stage that is restarted.
    """
    config = actor_factory.config
    every = {
        name: teacher.refresh_every
        for name, teacher in config.teachers.items()
        if isinstance(teacher, SelfTeacher) and teacher.refresh_every
    }
    if not every:
        return sync

    async def load(teacher: str, version: int, directory: str) -> None:
        newest[teacher] = weights = TeacherWeights(
            version, directory, config.timeouts.engine_start_s
        )
        await scorer.load(teacher, weights)

    run_dir = Path(config.run_dir or ".").absolute()
    store = Checkpoints(run_dir / "checkpoints", config.checkpoint.keep)
    copies = WeightCopies(
        run_dir / "teachers",
        Path(config.student.model),
        lambda: [config.version_after(step) for step in store.begun()],
    )
    return RefreshingSync(sync, every, trainer.save, load, copies, actor_factory.notify)


@dataclass
class _RebuildStudent:
    """Builds replicas of the student anew, and has them join the weight sync.

    ``gpus`` waits for the turn of the teachers that share the students' GPUs, if any do.
    """

    actor_factory: ActorFactory
    queue: QueueProxy
    gpus: Gpus
    sync: BroadcastSync | None = None

    async def __call__(self, member: Member[StudentProxy]) -> StudentProxy:
        """See rollouter.stage.RebuildStudent."""
        member.value.kill()
        async with self.gpus:
            return await self._built(member.index, member.incarnation + 1)

    async def _built(self, index: int, life: int) -> StudentProxy:
        assert self.sync is not None
        student = await self.actor_factory.student(index, self.queue, life)
        try:
            await self.sync.rejoin(index, student, await student.ready())
        except BaseException:
            student.kill()
            raise
        return student


def _enough_gpus(config: RunConfig) -> None:
    """ConfigError if the cluster has fewer GPUs than the pools take: actors would wait for ever."""
    wanted = sum(pool.gpus for pool in pools(config))
    found = int(ray.cluster_resources().get("GPU", 0))
    if wanted > found:
        message = f"the pools take {wanted} GPUs, the Ray cluster has {found}"
        remedy = "take fewer replicas, or join a larger cluster"
        raise ConfigError([Problem("cluster", "cluster.address", message, remedy)])
