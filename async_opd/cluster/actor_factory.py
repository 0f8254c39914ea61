"""Starts the Ray actors of a run and its engines, and ends all of them.

One actor is one process. A colocated engine runs on the GPUs of another actor, its host.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from async_opd.checks.gpu_memory import beside
from async_opd.checks.resources import Pool, guests_of, hosts_of, pools
from async_opd.cluster import actor_names
from async_opd.cluster.actor_names import ActorName, run_name
from async_opd.cluster.actor_shell import ActorPlacement
from async_opd.cluster.network import shared_environment
from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.cluster.proxies import QueueProxy, StudentProxy, TeacherProxy
from async_opd.cluster.remote import START_KEY, Remote, when_free
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.errors import Displaced, EngineStartError
from async_opd.media.cache import FromQueue, MediaCache
from async_opd.models.engine_args import Device, engine_env
from async_opd.models.model_files import is_vision_model
from async_opd.sharing.gpu_turns import Barriers
from async_opd.waiting.deadline import Bound, gather_or_cancel
from async_opd.waiting.waits import Waits
from rollouter.spec import StudentEngineSpec
from teachers.endpoint.replica import EndpointReplica, endpoint_spec
from teachers.spec import TeacherEngineSpec

Build = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Factory:
    """``module:callable`` of an actor's object, and arguments after those of every run."""

    path: str
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Factories:
    """The factories of a run. Benchmarks replace them by simulated ones; no config can."""

    student: Factory = Factory("rollouter.replica:StudentReplica")
    teacher: Factory = Factory("teachers.replica:TeacherReplica")
    trainer: Factory = Factory("async_opd.cluster.trainer_actor:build_trainer")


def discard(text: str) -> None:
    """Ignores a message."""


@dataclass
class ActorFactory:
    """Starts processes and engines; ``close`` ends all that it started."""

    config: RunConfig
    device: Device
    eos_ids: tuple[int, ...]
    factories: Factories
    notify: Callable[[str], None]
    bundles: GpuBundles = field(default_factory=GpuBundles)
    compare_node: Callable[[str], Awaitable[None]] | None = None
    waits: Waits = field(default_factory=lambda: Waits(discard))
    started: list[Remote] = field(default_factory=list)
    engines: list[Remote] = field(default_factory=list)
    stages: list[Remote] = field(default_factory=list)
    colocated: dict[str, dict[int, TeacherProxy | StudentProxy]] = field(default_factory=dict)
    barriers: Barriers = field(default_factory=Barriers)
    images: QueueProxy | None = None  # the queue, which has those of prompts
    stored_from: int | None = None
    """Bytes from which on a sample's payload stays on its teacher's node; None: by value."""

    def __post_init__(self) -> None:
        """Reads the driver's environment: teachers are rebuilt in a process with another one."""
        self.env = shared_environment(self.config.cluster, os.environ)
        self.run_dir = str(Path(self.config.run_dir or ".").absolute())  # for other processes
        self._known_beside: dict[str, int] = {}  # by pool

    async def student(self, index: int, queue: QueueProxy, incarnation: int = 0) -> StudentProxy:
        """One replica of the student; ``incarnation`` counts its restarts.

        Those that only evaluate have the indices after those of the rollout replicas.
        """
        config, (pool, at) = self.config, actor_names.pool_of_student(self.config, index)
        actor, evaluates = actor_names.in_pool(pool, at), pool != "rollout"
        given = (config, self.device, self.eos_ids, actor.name)
        spec = StudentEngineSpec.of(*given, index, incarnation, self._beside(pool), evaluates)
        media = image_caches(config, config.student.model, queue)
        remote = await self._start(
            actor,
            self.factories.student.path,
            (spec, queue, *self.factories.student.extra, *media),
            gpus=config.rollout.tensor_parallel,
            bundle=self._bundle(pool, at),
            guest="rollout" if self._pool(pool).shares is not None else "",
            trusted=bool(spec.kwargs["trust_remote_code"]),
        )
        return StudentProxy(remote, spec.consumer)

    async def teacher(self, teacher_name: str, index: int) -> TeacherProxy | EndpointReplica:
        """One replica of a teacher: an actor, or the client of an external server."""
        config, teacher = self.config, self.config.teachers[teacher_name]
        actor = actor_names.teacher(teacher_name, index)
        if isinstance(teacher, EndpointTeacher):
            server = endpoint_spec(config, teacher, actor.name, teacher.urls[index])
            return EndpointReplica(server, *image_caches(config, config.student.model, self.images))
        given = (config, self.device, self.eos_ids, actor.name)
        spec = TeacherEngineSpec.of(*given, teacher_name, self._beside(f"teachers.{teacher_name}"))
        media = image_caches(config, config.teacher_model(teacher_name), self.images)
        path, args = self.factories.teacher.path, (spec, *self.factories.teacher.extra, *media)
        if self.stored_from is not None:
            args = (path, args, self.images, actor.name, self.stored_from)
            path = "async_opd.cluster.payloads.storing:storing"
        remote = await self._start(
            actor,
            path,
            args,
            gpus=teacher.tensor_parallel,
            bundle=self._bundle(f"teachers.{teacher_name}", index),
            guest=f"teachers.{teacher_name}" if teacher.host is not None else "",
            trusted=bool(spec.kwargs["trust_remote_code"]),
        )
        return TeacherProxy(remote)

    def _beside(self, pool: str) -> int | None:
        if self.device == "cuda" and pool not in self._known_beside:  # reads a model's files
            self._known_beside[pool] = beside(self.config, pool)
        return self._known_beside.get(pool)

    def _bundle(self, pool: str, index: int) -> tuple[str, int]:
        """The bundle in which an engine of a pool starts: of a guest that of its first host."""
        host = self._pool(pool).shares
        return (pool, index) if host is None else (host, hosts_of(self.config, pool)[index][0])

    def _pool(self, name: str) -> Pool:
        return next(pool for pool in pools(self.config) if pool.name == name)

    async def _shared_place(self, guest: str, first: int) -> ActorPlacement | None:
        """The GPUs of a guest now: as many of its hosts' as it needs; None on a CPU.

        ``first`` is its first host. Its hosts are on one node (``checks.gpu_plan``), which is
        another one after a node is lost.
        """
        if self.device == "cpu":
            return None
        pool = self._pool(guest)
        (hosts,) = (hosts for hosts in hosts_of(self.config, guest) if hosts[0] == first)
        places = await gather_or_cancel(*(self._place(str(pool.shares), at) for at in hosts))
        gpus = [gpu for place in places for gpu in place.gpus]
        return ActorPlacement(places[0].node, tuple(gpus[: pool.gpus_per_replica]))

    async def _place(self, host: str, index: int) -> ActorPlacement:
        """The GPUs of a host's bundle, also while its process is dead."""
        actor = actor_names.in_pool(host, index)
        strategy = await self.bundles.strategy(actor.name, host, index)
        return await Remote.place_of(
            actor.name,
            f"{run_name(self.config)}/{actor.path}",
            strategy,
            self._pool(host).gpus_per_replica,
            self.config.timeouts.engine_start_s,
            self.notify,
        )

    async def build_after_guests(
        self,
        host: str,
        indices: Iterable[int],
        build: Build,
        queue: QueueProxy | None = None,
    ) -> None:
        """Builds a host of one or several processes after the engines that share their GPUs.

        ``indices`` are those of its processes in the pool. Each then finds the memory of its
        GPUs free. On a CPU all are built at the same time. Guests that are replicas of the student
        need the ``queue``.
        """
        guests = [self._start_all_asleep(host, index, queue) for index in indices]
        if self.device == "cpu":
            await gather_or_cancel(build(), *guests)
        else:
            await gather_or_cancel(*guests)
            await build()

    async def _start_all_asleep(self, host: str, index: int, queue: QueueProxy | None) -> None:
        """Starts the guests on the GPUs of one process; on GPUs each sleeps before the next.

        A guest on the GPUs of several processes starts when all of them have no other to start.
        Those that were started before are rebuilt by their own pool, when it is their turn.
        """
        guests = {
            name: (at, hosts)
            for name in guests_of(self.config, host)
            for at, hosts in enumerate(hosts_of(self.config, name))
            if index in hosts
        }
        new = {n: found for n, found in guests.items() if found[0] not in self.colocated.get(n, {})}
        if self.device == "cpu":
            first = ((name, at) for name, (at, hosts) in new.items() if index == hosts[0])
            await gather_or_cancel(*(self._start_asleep(*one, queue) for one in first))
            return
        for name, (at, hosts) in new.items():
            start = partial(self._start_asleep, name, at, queue)
            await self.barriers.arrive((name, at), index, hosts, start)

    async def _start_asleep(self, pool: str, index: int, queue: QueueProxy | None = None) -> None:
        guest: TeacherProxy | StudentProxy | EndpointReplica
        if pool == "rollout":
            assert queue is not None
            guest = await self.student(index, queue)
        else:
            guest = await self.teacher(pool.removeprefix("teachers."), index)
        assert not isinstance(guest, EndpointReplica)
        bound_s = self.config.timeouts.engine_start_s
        try:
            async with Bound(bound_s):
                await guest.sleep()
        except BaseException as error:
            guest.kill()  # no other part has a handle of it yet
            if not isinstance(error, TimeoutError):
                raise
            cause = f"did not go to sleep within {bound_s:g} s, before its host is built"
            remedy = f"raise {START_KEY} if it is only slow; otherwise see its log"
            raise EngineStartError(guest.remote.name, cause, remedy) from error
        self.colocated.setdefault(pool, {})[index] = guest

    def anew(self) -> ActorFactory:
        """The same for another process, which has started nothing yet and has no log."""
        return replace(
            self,
            notify=discard,
            waits=Waits(discard),
            started=[],
            engines=[],
            stages=[],
            colocated={},
            barriers=Barriers(),
        )

    async def displaced(self) -> Displaced | None:
        """The error of the first process that lost its machine, if one did."""
        found = await gather_or_cancel(*(remote.displaced() for remote in self.started))
        return next(filter(None, found), None)

    def drop(self, remote: Remote) -> None:
        """Kills a process without which the start goes on: it is not the cause of other errors."""
        remote.kill()
        for known in (self.started, self.engines):
            if remote in known:
                known.remove(remote)

    async def end(self) -> None:
        """Ends all that it started, and forgets it: all can be started again."""
        for stage in self.stages:
            stage.kill()  # what it rebuilt dies with it; one without an object answers no shutdown
        self.stages.clear()
        await self.close()
        for known in (self.started, self.engines, self.colocated):
            known.clear()
        self.barriers = Barriers()

    async def close(self) -> None:
        """Stops stages that would rebuild engines, shuts engines down, then kills every process."""
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
        actor: ActorName,
        factory: str,
        args: tuple[Any, ...],
        *,
        gpus: int,
        bundle: tuple[str, int],
        guest: str = "",
        trusted: bool = False,
    ) -> Remote:
        """Starts and builds an engine in a bundle.

        ``guest`` is the name of a pool that uses the GPUs of the bundle's process, its host. Such
        an engine starts in its turn, which others wait for: Displaced if the bundle has no place.
        """
        reserved = gpus if self.device == "cuda" and not guest else 0
        timeouts = self.config.timeouts
        env = engine_env(self.device, timeouts.engine_start_s, timeouts.request_s, trusted)

        async def started() -> Remote:
            place = await self._shared_place(guest, bundle[1]) if guest else None
            remote = await self.create(actor, env=env, gpus=reserved, bundle=bundle, place=place)
            try:
                build = partial(remote.build, factory, args, timeouts.engine_start_s)
                with self.waiting(actor.name):
                    if guest:
                        await build()
                    else:
                        await self.build_after_guests(bundle[0], [bundle[1]], build)
            except BaseException:
                self.drop(remote)
                raise
            self.engines.append(remote)  # an actor without an object can only be killed
            return remote

        if guest:
            units = self.bundles.units_with(*bundle)
            return await self.bundles.while_placed(actor.name, units, started())
        return await started()

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Around the build of an object: the waits name its process."""
        return self.waits.on(f"{name} to start", self.config.timeouts.engine_start_s)

    async def create(
        self,
        actor: ActorName,
        *,
        env: dict[str, str] | None = None,
        gpus: int = 0,
        bundle: tuple[str, int] | None = None,
        restarts: bool = False,
        place: ActorPlacement | None = None,
    ) -> Remote:
        """Starts an actor's process, which ``close`` will end. ``bundle``: see GpuBundles.

        Without one it is a singleton, and on the node of the trainer, where samples end.
        """
        strategy = await self.bundles.strategy(actor.name, *(bundle or ()))
        create = partial(
            Remote.create,
            actor.name,
            timeout_s=self.config.timeouts.request_s,
            env={**(env or {}), **self.env},
            gpus=gpus,
            bundle=strategy,
            restarts=restarts,
            place=place,
            actor=f"{run_name(self.config)}/{actor.path}",
            kind=actor.kind,
        )
        bound = self.config.timeouts.engine_start_s
        with self.waits.on(f"{actor.name} to be free as a name in Ray", bound):
            remote = await when_free(create, actor.name, bound)
        remote.compare_node = self.compare_node
        self.started.append(remote)
        return remote


def image_caches(config: RunConfig, model: str, queue: QueueProxy | None) -> tuple[MediaCache, ...]:
    """The cache of a model's replica, its last argument; none if the model takes no images.

    Without a queue there is none: the replica's requests then have no images.
    """
    if queue is None or not is_vision_model(model):
        return ()
    nbytes = config.data.image_cache_mib << 20
    return (MediaCache(FromQueue(queue), nbytes, config.timeouts.request_s),)
