"""Builds the cluster of a run: one actor per box, all of them at the same time.

queue ─┬─ student/0 … student/N-1     rollouter
├─ <teacher>/0 … per teacher   scorer
└─ trainer                     (then: rendezvous of trainer and students)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from async_opd.cluster.host import Remote
from async_opd.cluster.proxies import (
    QueueProxy,
    ScorerProxy,
    StudentProxy,
    TeacherProxy,
    TrainerProxy,
)
from async_opd.cluster.session import ray_session
from async_opd.core.config import (
    EndpointTeacher,
    EngineTeacher,
    RunConfig,
    SelfTeacher,
    VllmTeacher,
)
from async_opd.core.engine_args import Device, engine_env, engine_kwargs
from async_opd.core.errors import ConfigError, Problem, StageError, first_cause
from async_opd.core.loss_config import score_kind, scored_top_k
from async_opd.core.pools import pools
from async_opd.core.refresh import RefreshingSync
from async_opd.core.stages import DEAD, PROMPTS, STALE, SamplingSpec, WeightSync, topics
from async_opd.core.weight_sync import BroadcastSync
from rollouter.rollouter import RollouterStage
from rollouter.spec import StudentEngineSpec
from teachers.endpoint import EndpointReplica
from teachers.endpoint_spec import endpoint_spec
from teachers.pool import Weights
from teachers.spec import TeacherEngineSpec

Teachers = Mapping[str, Sequence[TeacherProxy | EndpointReplica]]


@dataclass(frozen=True)
class Stages:
    """Everything the pipeline talks to."""

    queue: QueueProxy
    rollouter: RollouterStage
    scorer: ScorerProxy
    trainer: TrainerProxy
    sync: WeightSync


@dataclass(frozen=True)
class Factory:
    """What an actor builds: ``module:callable``, and arguments after those of every run."""

    path: str
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Factories:
    """The real parts. Benchmarks replace them with simulated ones; no config can."""

    student: Factory = Factory("rollouter.replica:StudentReplica")
    teacher: Factory = Factory("teachers.replica:TeacherReplica")
    trainer: Factory = Factory("async_opd.cluster.trainer:build_trainer")


def _nobody(name: str, error: Exception) -> None:
    """Is told, and does nothing."""


@asynccontextmanager
async def launch(
    config: RunConfig,
    *,
    device: Device,
    eos_ids: tuple[int, ...],
    factories: Factories | None = None,
    on_lost: Callable[[str, Exception], None] = _nobody,
) -> AsyncIterator[Stages]:
    """Starts Ray and all actors; ends every one of their processes on the way out.

    ``on_lost(name, error)`` is told of a rollout replica that died while others are left.

    Raises EngineStartError naming the first box that did not come up.
    """
    async with ray_session(config):
        if device == "cuda":
            _enough_gpus(config)
        boxes = _Boxes(config, device, eos_ids, factories or Factories(), on_lost)
        try:
            yield await _build(boxes)
        finally:
            await boxes.close()


async def _build(boxes: _Boxes) -> Stages:
    config = boxes.config
    queue = QueueProxy(await boxes.queue())
    try:
        async with asyncio.TaskGroup() as group:
            student_tasks = [
                group.create_task(boxes.student(index, queue))
                for index in range(config.rollout.replicas)
            ]
            teacher_tasks = {
                name: [
                    group.create_task(boxes.teacher(name, index))
                    for index in range(teacher.replicas)
                ]
                for name, teacher in config.teachers.items()
            }
            trainer_task = group.create_task(boxes.trainer(queue))
    except ExceptionGroup as errors:
        raise first_cause(errors) from errors
    students = [task.result() for task in student_tasks]
    teachers = {name: [task.result() for task in tasks] for name, tasks in teacher_tasks.items()}
    trainer = TrainerProxy(trainer_task.result())
    receivers = [StudentProxy(student) for student in students]
    sync = BroadcastSync(
        trainer,
        receivers,
        await asyncio.gather(*(student.ready() for student in receivers)),
        on_sync=config.async_.on_sync,
        timeout_s=config.sync.timeout_s,
        rolling=config.sync.rolling,
        drain_timeout_s=(config.timeouts.request_s if config.async_.on_sync == "finish" else None),
    )
    await sync.connect()

    def lost(name: str, error: Exception) -> None:
        sync.lose([student.name for student in receivers].index(name))
        boxes.on_lost(name, error)

    rollouter = RollouterStage(
        {student.name: student for student in receivers},
        queue,
        lost=lost,
    )
    scorer = ScorerProxy(await boxes.scorer(teachers, queue))
    return Stages(queue, rollouter, scorer, trainer, _refreshing(config, sync, trainer, scorer))


def _refreshing(
    config: RunConfig, sync: WeightSync, trainer: TrainerProxy, scorer: ScorerProxy
) -> WeightSync:
    """The sync, which also refreshes teachers that are the student itself."""
    every = {
        name: teacher.refresh_every
        for name, teacher in config.teachers.items()
        if isinstance(teacher, SelfTeacher) and teacher.refresh_every
    }
    if not every:
        return sync

    async def load(teacher: str, version: int, directory: str) -> None:
        weights = Weights(version, directory, config.timeouts.engine_start_s)
        await scorer.load(teacher, weights)

    directory = Path(config.run_dir or ".").absolute() / "teachers"
    return RefreshingSync(sync, every, trainer.save, load, directory)


@dataclass
class _Boxes:
    """Starts each kind of actor, and remembers all of them."""

    config: RunConfig
    device: Device
    eos_ids: tuple[int, ...]
    factories: Factories
    on_lost: Callable[[str, Exception], None]
    started: list[Remote] = field(default_factory=list)
    engines: list[Remote] = field(default_factory=list)
    stages: list[Remote] = field(default_factory=list)

    async def queue(self) -> Remote:
        """The message queue."""
        config = self.config
        limits = (config.queue.max_samples, config.queue.max_mib << 20, config.queue.lease_s)
        args = (topics(config.teachers), *limits, None, (PROMPTS, STALE, DEAD))
        return await self._start("queue", "async_opd.core.queue:MessageQueue", args)

    async def student(self, index: int, queue: QueueProxy) -> Remote:
        """One replica of the student."""
        config = self.config
        rollout = config.rollout
        name = f"student/{index}"
        spec = StudentEngineSpec(
            name=name,
            kwargs=engine_kwargs(
                rollout.engine,
                model=config.student.model,
                device=self.device,
                tensor_parallel=rollout.tensor_parallel,
                seed=config.seed + index,
                trust_remote_code=config.student.trust_remote_code,
            ),
            sampling=SamplingSpec(
                rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.n
            ),
            eos_ids=self.eos_ids,
            transfer_backend=transfer_backend(config, self.device),
            concurrency=rollout.concurrency,
            top_k=scored_top_k(config.loss) if score_kind(config.loss) == "student_topk" else 0,
            grader=config.reward.grader if config.reward else None,
            seed=config.seed if rollout.reproducible else None,
        )
        return await self._start(
            name,
            self.factories.student.path,
            (spec, queue, *self.factories.student.extra),
            engine_gpus=rollout.tensor_parallel,
        )

    async def teacher(self, teacher_name: str, index: int) -> TeacherProxy | EndpointReplica:
        """One replica of a teacher; a server of somebody else needs no actor."""
        teacher = self.config.teachers[teacher_name]
        name = f"teacher {teacher_name}/{index}"
        if isinstance(teacher, EndpointTeacher):
            spec = endpoint_spec(self.config, teacher, name, teacher.urls[index])
            return EndpointReplica(spec)
        return TeacherProxy(await self._engine(teacher, teacher_name, name))

    async def _engine(self, teacher: EngineTeacher, teacher_name: str, name: str) -> Remote:
        config = self.config
        spec = TeacherEngineSpec(
            name=name,
            kwargs=engine_kwargs(
                teacher.engine,
                model=config.teacher_model(teacher_name),
                device=self.device,
                tensor_parallel=teacher.tensor_parallel,
                seed=config.seed,
                trust_remote_code=(
                    teacher if isinstance(teacher, VllmTeacher) else config.student
                ).trust_remote_code,
            ),
            kind=score_kind(config.loss),
            top_k=scored_top_k(config.loss),
            eos_ids=self.eos_ids,
            device=self.device,
        )
        return await self._start(
            name,
            self.factories.teacher.path,
            (spec, *self.factories.teacher.extra),
            engine_gpus=teacher.tensor_parallel,
        )

    async def trainer(self, queue: QueueProxy) -> Remote:
        """The trainer."""
        return await self._start(
            "trainer",
            self.factories.trainer.path,
            (self.config, self.device, queue, *self.factories.trainer.extra),
            env={"OMP_NUM_THREADS": str(self.config.train.threads)},
            gpus=int(self.device == "cuda"),
        )

    async def scorer(self, teachers: Teachers, queue: QueueProxy) -> Remote:
        """The scoring stage."""
        sizes = {name: t.batch_size for name, t in self.config.teachers.items()}
        health = {name: teacher.health for name, teacher in self.config.teachers.items()}
        rebuild = _Rebuild(replace(self, on_lost=_nobody, started=[], engines=[], stages=[]))
        args = (teachers, queue, sizes, health, rebuild)
        remote = await self._start("scorer", "teachers.scorer:ScorerStage", args)
        self.stages.append(remote)
        return remote

    async def close(self) -> None:
        """Stops stages that would mend engines, shuts engines down, then kills every process."""
        for remotes in (self.stages, self.engines):
            shutdowns = (
                remote.call("shutdown", timeout_s=self.config.timeouts.shutdown_s)
                for remote in remotes
            )
            await asyncio.gather(*shutdowns, return_exceptions=True)  # a dead one needs no shutdown
        for remote in self.started:
            remote.kill()

    async def _start(
        self,
        name: str,
        factory: str,
        args: tuple[Any, ...],
        *,
        env: dict[str, str] | None = None,
        engine_gpus: int = 0,
        gpus: int = 0,
    ) -> Remote:
        timeouts = self.config.timeouts
        if engine_gpus:
            env = engine_env(self.device)
            gpus = engine_gpus if self.device == "cuda" else 0
        remote = Remote.create(name, timeout_s=timeouts.request_s, env=env, gpus=gpus)
        self.started.append(remote)
        await remote.build(factory, args, timeouts.engine_start_s)
        if engine_gpus:
            self.engines.append(remote)  # what is not built cannot be shut down, only killed
        return remote


@dataclass
class _Rebuild:
    """Builds teachers' replicas anew; lives in the scoring stage's process, which owns them."""

    boxes: _Boxes

    async def __call__(self, teacher: str, index: int, old: TeacherProxy) -> TeacherProxy:
        """See teachers.pool.Rebuild."""
        old.kill()
        replica = await self.boxes.teacher(teacher, index)
        assert isinstance(replica, TeacherProxy)  # servers are waited for, not rebuilt
        return replica

    async def close(self) -> None:
        """See teachers.pool.Rebuild."""
        await self.boxes.close()


def _enough_gpus(config: RunConfig) -> None:
    """ConfigError if the cluster has fewer GPUs than the pools take: actors would wait for ever."""
    wanted = sum(pool.gpus for pool in pools(config))
    found = int(ray.cluster_resources().get("GPU", 0))
    if wanted > found:
        message = f"the pools take {wanted} GPUs, the Ray cluster has {found}"
        remedy = "take fewer replicas, or join a larger cluster"
        raise ConfigError([Problem("cluster", "cluster.address", message, remedy)])


def transfer_backend(config: RunConfig, device: Device) -> str:
    """The collective library of the weight sync. StageError for nccl without a GPU."""
    backend = config.sync.backend
    if backend == "nccl" and device == "cpu":
        raise StageError("weight sync", "sync.backend is nccl but the pools are on CPU", "use auto")
    if backend == "auto":
        return "nccl" if device == "cuda" else "gloo"
    return backend
