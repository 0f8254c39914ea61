"""Builds the cluster of a run: one actor per box, all of them at the same time.

queue ─┬─ student/0 … student/N-1     rollouter
       ├─ <teacher>/0 … per teacher   scorer
       └─ trainer                     (then: rendezvous of trainer and students)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray

from async_opd.cluster.host import Place, Remote
from async_opd.cluster.proxies import (
    QueueProxy,
    ScorerProxy,
    StudentProxy,
    TeacherProxy,
    TrainerProxy,
)
from async_opd.cluster.session import ray_session
from async_opd.cluster.singles import TRAINER, QueueBox, ScorerBox, Singles, Teachers, TrainerBox
from async_opd.core.config import (
    EndpointTeacher,
    EngineTeacher,
    RunConfig,
    SelfTeacher,
    VllmTeacher,
)
from async_opd.core.engine_args import Device, engine_env, engine_kwargs
from async_opd.core.errors import ConfigError, Problem, ProcessDied, StageError, first_cause
from async_opd.core.loss_config import score_kind, scored_top_k
from async_opd.core.pools import pools
from async_opd.core.refresh import RefreshingSync
from async_opd.core.stages import SamplingSpec, TeacherScorer, WeightSync
from async_opd.core.turns import Host, LockedSync, ScorerInTurns, Turns
from async_opd.core.weight_sync import BroadcastSync
from rollouter.rollouter import RollouterStage
from rollouter.spec import StudentEngineSpec
from teachers.endpoint import EndpointReplica
from teachers.endpoint_spec import endpoint_spec
from teachers.pool import Weights
from teachers.spec import TeacherEngineSpec


@dataclass(frozen=True)
class Stages:
    """Everything the pipeline talks to."""

    queue: QueueProxy
    rollouter: RollouterStage
    scorer: TeacherScorer
    trainer: TrainerProxy
    sync: WeightSync
    broadcast: BroadcastSync
    singles: Singles

    async def keep(self, reissue: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """See async_opd.pipeline.Stages."""
        await self.singles.keep(reissue)

    async def rewind(self, error: ProcessDied, *, to_start: bool) -> None:
        """After the trainer died: all stages are as new, and the engines as they are.

        They get the first weights ``to_start``, otherwise it is left to who knows of others.
        Raises the error if the trainer died too often.
        """
        await self.rollouter.halt()
        await self.singles.renew(error)
        await self.broadcast.forget()
        if to_start:
            await self.sync.snapshot(0)
            await self.sync.push()


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


def _nobody(text: str) -> None:
    """Is told, and does nothing."""


@asynccontextmanager
async def launch(
    config: RunConfig,
    *,
    device: Device,
    eos_ids: tuple[int, ...],
    factories: Factories | None = None,
    tell: Callable[[str], None] = _nobody,
) -> AsyncIterator[Stages]:
    """Starts Ray and all actors; ends every one of their processes on the way out.

    ``tell`` gets a line about everything that died and was restarted.

    Raises EngineStartError naming the first box that did not come up.
    """
    async with ray_session(config):
        if device == "cuda":
            _enough_gpus(config)
        boxes = _Boxes(config, device, eos_ids, factories or Factories(), tell)
        try:
            yield await _build(boxes)
        finally:
            await boxes.close()


async def _build(boxes: _Boxes) -> Stages:
    config = boxes.config
    queue_box = await boxes.queue()
    queue = QueueProxy(queue_box.remote)
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
                if teacher.host is None
            }
            trainer_task = group.create_task(boxes.trainer(queue))
    except ExceptionGroup as errors:
        raise first_cause(errors) from errors
    students = [task.result() for task in student_tasks]
    teachers = {name: [task.result() for task in tasks] for name, tasks in teacher_tasks.items()}
    teachers |= {name: list(seated.values()) for name, seated in boxes.seated.items()}
    training = trainer_task.result()
    trainer = TrainerProxy(training.remote)
    rollouter, broadcast = await _rollouts(boxes, queue, trainer, students)
    scoring = await boxes.scorer(teachers, queue)
    scorer = ScorerProxy(scoring.remote)
    synced = _refreshing(config, broadcast, trainer, scorer, scoring.weights)
    turns = _turns(config, scorer, rollouter, trainer)
    return Stages(
        queue,
        rollouter,
        ScorerInTurns(scorer, list(turns.values())) if turns else scorer,
        trainer,
        LockedSync(synced, turns["rollout"].lock) if "rollout" in turns else synced,
        broadcast,
        Singles(config, boxes.tell, queue_box, scoring, training),
    )


def _turns(
    config: RunConfig, scorer: ScorerProxy, rollouter: RollouterStage, trainer: TrainerProxy
) -> dict[str, Turns]:
    """One for each pool that shares its GPUs with teachers."""
    hosts: dict[str, Callable[[], Mapping[str, Host]]] = {
        "rollout": lambda: cast(Mapping[str, Host], rollouter.replicas),
        "train": lambda: {"trainer": trainer},
    }
    shared = {teacher.host for teacher in config.teachers.values() if teacher.host is not None}
    bound = config.timeouts.request_s
    return {name: Turns(name, hosts[name], scorer, rest_timeout_s=bound) for name in sorted(shared)}


async def _rollouts(
    boxes: _Boxes, queue: QueueProxy, trainer: TrainerProxy, students: list[StudentProxy]
) -> tuple[RollouterStage, BroadcastSync]:
    """The pool of student replicas, and the weight sync to them: each tells the other of a loss."""
    config = boxes.config
    names = [student.name for student in students]
    sync = BroadcastSync(
        trainer,
        students,
        await asyncio.gather(*(student.ready() for student in students)),
        on_sync=config.async_.on_sync,
        timeout_s=config.sync.timeout_s,
        rolling=config.sync.rolling,
        drain_timeout_s=(config.timeouts.request_s if config.async_.on_sync == "finish" else None),
        tries=config.sync.tries,
        lost=lambda index, error: rollouter.lose(names[index], error),
    )
    rollouter = RollouterStage(
        dict(zip(names, students, strict=True)),
        queue,
        _RebuildStudent(boxes, queue, sync, names),
        config.supervision,
        lost=lambda name, error: sync.lose(names.index(name)),
        tell=boxes.tell,
    )
    await sync.connect()
    return rollouter, sync


def _refreshing(
    config: RunConfig,
    sync: WeightSync,
    trainer: TrainerProxy,
    scorer: ScorerProxy,
    newest: dict[str, Weights],
) -> WeightSync:
    """The sync, which also refreshes teachers that are the student itself.

    ``newest`` gets what each has, for a scoring stage that is restarted.
    """
    every = {
        name: teacher.refresh_every
        for name, teacher in config.teachers.items()
        if isinstance(teacher, SelfTeacher) and teacher.refresh_every
    }
    if not every:
        return sync

    async def load(teacher: str, version: int, directory: str) -> None:
        newest[teacher] = weights = Weights(version, directory, config.timeouts.engine_start_s)
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
    tell: Callable[[str], None]
    started: list[Remote] = field(default_factory=list)
    engines: list[Remote] = field(default_factory=list)
    stages: list[Remote] = field(default_factory=list)
    places: dict[tuple[str, int], Place] = field(default_factory=dict)
    seated: dict[str, dict[int, TeacherProxy]] = field(default_factory=dict)

    async def queue(self) -> QueueBox:
        """The message queue."""
        queue = QueueBox(self._create("queue", restarts=True), self.config)
        await queue.build()
        return queue

    async def student(self, index: int, queue: QueueProxy, life: int = 0) -> StudentProxy:
        """One replica of the student; ``life`` counts its restarts."""
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
                sleeps=any(teacher.host == "rollout" for teacher in config.teachers.values()),
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
            life=life,
        )
        remote = await self._start(
            name,
            self.factories.student.path,
            (spec, queue, *self.factories.student.extra),
            engine_gpus=rollout.tensor_parallel,
            host=("rollout", index),
        )
        return StudentProxy(remote, spec.consumer)

    async def teacher(self, teacher_name: str, index: int) -> TeacherProxy | EndpointReplica:
        """One replica of a teacher; a server of somebody else needs no actor."""
        teacher = self.config.teachers[teacher_name]
        name = f"teacher {teacher_name}/{index}"
        if isinstance(teacher, EndpointTeacher):
            spec = endpoint_spec(self.config, teacher, name, teacher.urls[index])
            return EndpointReplica(spec)
        place = self.places.get((teacher.host or "", index))
        return TeacherProxy(await self._engine(teacher, teacher_name, name, place))

    async def _seat(
        self, host: str, index: int, remote: Remote, build: Callable[[], Awaitable[None]]
    ) -> None:
        """Builds a host, after the teachers that share its GPUs, each asleep before the next.

        So each finds the memory free. On a CPU there is nothing to wait for.
        """
        config = self.config
        guests = [
            name
            for name, teacher in config.teachers.items()
            if teacher.host == host and index < teacher.replicas
            if index not in self.seated.get(name, {})  # they outlive their host
        ]
        if self.device == "cpu":
            await asyncio.gather(build(), *(self._guest(name, index) for name in guests))
            return
        if guests:
            self.places[host, index] = await remote.place(config.timeouts.engine_start_s)
        for name in guests:
            await self._guest(name, index)
        await build()

    async def _guest(self, name: str, index: int) -> None:
        teacher = await self.teacher(name, index)
        assert isinstance(teacher, TeacherProxy)
        await teacher.sleep()
        self.seated.setdefault(name, {})[index] = teacher

    async def _engine(
        self, teacher: EngineTeacher, teacher_name: str, name: str, place: Place | None
    ) -> Remote:
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
                sleeps=teacher.host is not None,
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
            place=place,
        )

    async def trainer(self, queue: QueueProxy) -> TrainerBox:
        """The trainer."""
        remote = self._create(
            TRAINER,
            env={"OMP_NUM_THREADS": str(self.config.train.threads)},
            gpus=int(self.device == "cuda"),
            restarts=True,
        )
        factory = self.factories.trainer
        args = (self.config, self.device, queue, *factory.extra)
        trainer = TrainerBox(remote, self.config, factory.path, args)
        await self._seat("train", 0, remote, trainer.build)
        return trainer

    async def scorer(self, teachers: Teachers, queue: QueueProxy) -> ScorerBox:
        """The scoring stage."""
        boxes = replace(self, tell=_nobody, started=[], engines=[], stages=[], seated={})
        rebuild = _Rebuild(boxes)
        scorer = ScorerBox(
            self._create("scorer", restarts=True), self.config, teachers, queue, rebuild
        )
        await scorer.build()
        self.stages.append(scorer.remote)
        return scorer

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
        place: Place | None = None,
        host: tuple[str, int] | None = None,
    ) -> Remote:
        """``place``: on whose GPUs it is; ``host``: it may have guests on its own."""
        if engine_gpus:
            env = engine_env(self.device)
            gpus = engine_gpus if self.device == "cuda" and place is None else 0
        remote = self._create(name, env=env, gpus=gpus, place=place)
        try:
            build = partial(remote.build, factory, args, self.config.timeouts.engine_start_s)
            await (build() if host is None else self._seat(*host, remote, build))
        except BaseException:
            remote.kill()
            raise
        if engine_gpus:
            self.engines.append(remote)  # what is not built cannot be shut down, only killed
        return remote

    def _create(
        self,
        name: str,
        *,
        env: dict[str, str] | None = None,
        gpus: int = 0,
        restarts: bool = False,
        place: Place | None = None,
    ) -> Remote:
        remote = Remote.create(
            name,
            timeout_s=self.config.timeouts.request_s,
            env=env,
            gpus=gpus,
            restarts=restarts,
            place=place,
        )
        self.started.append(remote)
        return remote


@dataclass
class _RebuildStudent:
    """Builds replicas of the student anew, and has them join the weight sync."""

    boxes: _Boxes
    queue: QueueProxy
    sync: BroadcastSync
    names: list[str]
    lives: Counter[str] = field(default_factory=Counter)

    async def __call__(self, name: str, old: StudentProxy) -> StudentProxy:
        """See rollouter.rollouter.Rebuild."""
        old.kill()
        self.lives[name] += 1
        index = self.names.index(name)
        student = await self.boxes.student(index, self.queue, self.lives[name])
        try:
            await self.sync.rejoin(index, student, await student.ready())
        except BaseException:
            student.kill()
            raise
        return student


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
