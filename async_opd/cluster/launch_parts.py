"""Starts Ray and a part of a run: engines that evaluate, a teacher, or the ranks that replay.

``ray_processes`` is Ray, with reserved GPUs, for the time of any launch, also of a whole run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

from async_opd.accounting.images import kept
from async_opd.cluster.actor_factory import ActorFactory, Factories, Factory, discard
from async_opd.cluster.placement.node_checks import check_nodes
from async_opd.cluster.placement.reserving import cpu_places, reserve
from async_opd.cluster.proxies import QueueProxy, ReplayerProxy, TeacherProxy
from async_opd.cluster.session import joining, ray_session
from async_opd.cluster.singleton_actors import QueueActor, TrainerActor
from async_opd.cluster.watching import ClusterWatch
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.errors import HeadLost
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import Queue, SamplingSpec
from async_opd.memory.pools import EVAL
from async_opd.models.engine_args import Device
from async_opd.queue.sizes import EpisodeBounds
from async_opd.waiting.deadline import gather_or_cancel, race
from async_opd.waiting.waits import Waits
from rollouter.stage import RollouterStage, RolloutReplica
from teachers.endpoint.replica import EndpointReplica


@asynccontextmanager
async def ray_processes(
    config: RunConfig,
    device: Device,
    eos_ids: tuple[int, ...],
    factories: Factories,
    notify: Callable[[str], None],
    only: Collection[str] | None = None,
    waits: Waits | None = None,
) -> AsyncIterator[tuple[ActorFactory, Callable[[], None]]]:
    """Starts Ray and reserves GPUs, of ``only`` some pools; at the end ends all processes.

    Yields the factory, and a call that tracks those of a local cluster, once all are started.
    """
    waits = waits or Waits(notify)
    if (address := config.cluster.joins) != config.cluster.address:
        config = joining(config)
        notify("cluster: a local one" if address is None else f"cluster: joining {address}")
    async with ray_session(config, notify, waits) as reaper:
        actor_factory = ActorFactory(config, device, eos_ids, factories, notify, waits=waits)
        await race(ClusterWatch(notify).run(), _prepare(actor_factory, only))
        lost = False
        try:
            yield actor_factory, (lambda: None) if reaper is None else reaper.track_descendants
        except HeadLost:  # Ray ends all processes, and this one soon: its record comes first
            lost = True
            raise
        finally:
            if not lost:
                with waits.on("the processes to end", config.timeouts.shutdown_s):
                    await actor_factory.close()


async def _prepare(actor_factory: ActorFactory, only: Collection[str] | None) -> None:
    """Compares the nodes of the cluster, and reserves the GPUs, or places on CPUs."""
    config, device, waits = actor_factory.config, actor_factory.device, actor_factory.waits
    bound = config.timeouts.engine_start_s
    with waits.on("reports of the nodes", bound):
        compared = await check_nodes(config, device)
    if compared is not None:
        actor_factory.compare_node = compared.compare
    if device == "cuda" and (only is None or only):
        with waits.on("GPUs", bound + config.cluster.wait_s):
            actor_factory.bundles = await reserve(config, actor_factory.notify, only or ())
    elif device == "cpu" and compared is not None:  # a local run has one node
        with waits.on("places for its processes", bound):
            actor_factory.bundles = await cpu_places(config)


@asynccontextmanager
async def launch_evaluators(
    config: RunConfig,
    *,
    device: Device,
    eos_ids: tuple[int, ...],
    factories: Factories | None = None,
    notify: Callable[[str], None] = discard,
) -> AsyncIterator[RollouterStage]:
    """Starts Ray and the ``eval.replicas`` of the student, and no other part of a run.

    The stage is in this process; it has to be run. Raises EngineStartError as ``launch`` does.
    """
    given = (device, eos_ids, factories or Factories(), notify)
    async with ray_processes(config, *given, only={EVAL}) as (actor_factory, track):
        queue = await _image_queue(actor_factory)
        first = config.rollout.max_replicas
        indices = range(first, first + config.eval.min_replicas)
        students = await gather_or_cancel(*(actor_factory.student(i, queue) for i in indices))
        await gather_or_cancel(*(student.ready() for student in students))
        track()
        named = {student.name: student for student in students}
        episodes = EpisodeBounds.of(config)
        yield _Evaluators(named, queue, None, config.supervision, pool=EVAL, episodes=episodes)


class _Evaluators(RollouterStage):
    """The stage in the driver's process, where prompts have their images' bytes."""

    def __init__(
        self, replicas: Mapping[str, RolloutReplica], queue: Queue, *of: Any, **named: Any
    ) -> None:
        super().__init__(replicas, queue, *of, **named)
        self._images, self._calls = queue, count()

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """See RollouterStage.generate; the queue holds the images meanwhile."""
        async with kept(self._images, f"evaluation {next(self._calls)}", prompts):
            return await super().generate(prompts, sampling)


@asynccontextmanager
async def launch_replayer(
    config: RunConfig, *, device: Device, notify: Callable[[str], None] = discard
) -> AsyncIterator[ReplayerProxy]:
    """Starts Ray and the trainer's ranks, which compute kept steps again, and no other part.

    Raises EngineStartError as ``launch`` does.
    """
    made = Factories(trainer=Factory("async_opd.cluster.trainer_actor:build_replayer"))
    given = (device, (), made, notify)
    async with ray_processes(config, *given, only={"train"}) as (actor_factory, track):
        replayer = await TrainerActor.start(actor_factory, None)
        track()
        yield ReplayerProxy(replayer.remote)


@asynccontextmanager
async def launch_teacher(
    config: RunConfig,
    name: str,
    *,
    device: Device,
    eos_ids: tuple[int, ...],
    prompts: Sequence[Prompt] = (),
    notify: Callable[[str], None] = discard,
) -> AsyncIterator[list[TeacherProxy | EndpointReplica]]:
    """Starts Ray and the replicas of one teacher, on dedicated GPUs, and no other part of a run.

    ``prompts`` are those that it will be asked about: if any has images, a queue that holds them is
    started, too. Raises EngineStartError as ``launch`` does.
    """
    is_server = isinstance(config.teachers[name], EndpointTeacher)
    only = set() if is_server else {f"teachers.{name}"}
    given = (device, eos_ids, Factories(), notify)
    async with ray_processes(config, *given, only=only) as (actor_factory, track):
        replicas: list[TeacherProxy | EndpointReplica] = []
        seen = [prompt for prompt in prompts if prompt.media]
        try:
            async with AsyncExitStack() as stack:
                if seen:
                    queue = await _image_queue(actor_factory)
                    await stack.enter_async_context(kept(queue, "scoring", seen))
                indices = range(config.teachers[name].min_replicas)
                starting = (actor_factory.teacher(name, index) for index in indices)
                replicas += await gather_or_cancel(*starting)
                await gather_or_cancel(*(replica.ready() for replica in replicas))
                track()
                yield replicas
        finally:
            for replica in replicas:
                if isinstance(replica, EndpointReplica):
                    await replica.close()


async def _image_queue(actor_factory: ActorFactory) -> QueueProxy:
    queue = await QueueActor.start(actor_factory)
    with actor_factory.waiting(queue.remote.name):
        await queue.build()
    return QueueProxy(queue.remote)
