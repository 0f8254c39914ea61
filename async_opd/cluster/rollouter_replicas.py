"""The rollout stage in the driver: it starts and owns the replicas that the actor orders.

See the picture in ``async_opd.cluster.rollouter_actor``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from async_opd.checkpoint.store import Checkpoints
from async_opd.cluster.actor_factory import ActorFactory
from async_opd.cluster.proxies import (
    QueueProxy,
    RollouterProxy,
    ScorerProxy,
    StudentProxy,
    TrainerProxy,
)
from async_opd.cluster.remote import START_KEY, Remote
from async_opd.cluster.rollouter_actor import Predecessor, StartedReplica
from async_opd.cluster.singleton_actors import SingletonActor
from async_opd.core.errors import StageError
from async_opd.core.reports import SyncReport
from async_opd.waiting.deadline import Bound, Deadline, gather_or_cancel
from async_opd.weight_sync.coordinator import Snapshot
from async_opd.weight_sync.teacher_refresh import TeacherRefresh, WeightCopies
from rollouter.orders import Order
from teachers.replica_slots import TeacherWeights

FACTORY = "async_opd.cluster.rollouter_actor:build_rollouter"


@dataclass
class RollouterActor(SingletonActor):
    """The rollout stage; implements ``async_opd.core.stages.WeightSync`` to its replicas.

    ``replicas`` are the current ones by index, dead ones too (see ``Replicas``); ``newest`` is the
    snapshot that they have, or receive, ``verified`` the last one that was pushed and compared.
    ``snapshots``: the first snapshot was begun, so that a replica may be behind.
    ``refresh`` gives the same weights to teachers that are the student itself.
    """

    remote: Remote
    actor_factory: ActorFactory
    replicas: list[StartedReplica | None]
    queue: QueueProxy
    trainer: TrainerProxy
    scorer: ScorerProxy
    newest: Snapshot | None = None
    verified: Snapshot | None = None
    rebuilds: int = 0
    snapshots: bool = False
    refresh: TeacherRefresh | None = None
    incarnations: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Begins without orders."""
        self.proxy = RollouterProxy(self.remote)
        self._starting: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        actor_factory: ActorFactory,
        remote: Remote,
        students: Sequence[StudentProxy | None],
        *stages: *tuple[QueueProxy, TrainerProxy, ScorerProxy],
    ) -> RollouterActor:
        """Builds the stage in ``remote`` over existing replicas; connects their first sync group.

        Nothing rebuilds an actor that dies meanwhile: its death is the launch's error, unless it is
        a replica whose machine is lost.
        """
        bound, remedy = actor_factory.config.timeouts.engine_start_s, f"raise {START_KEY}"
        waits = actor_factory.waits
        with waits.on("the replicas of the student", actor_factory.config.timeouts.request_s):
            ready = (_ready(student, actor_factory) for student in students)
            replicas = await gather_or_cancel(*ready)
        rollouter = cls(remote, actor_factory, replicas, *stages)
        with actor_factory.waiting(remote.name):
            await rollouter.build()
        actor_factory.stages.append(remote)
        with waits.on("the sync group of the replicas", bound):
            connecting = rollouter.proxy.connect()
            what = "connecting the sync group"
            try:
                await Deadline(remote.name).within(bound, what, connecting, remedy)
            except StageError:
                members = replicas[: actor_factory.config.rollout.max_replicas]
                there = [cast(StudentProxy, one.student) for one in members if one is not None]
                found = await gather_or_cancel(*(student.displaced() for student in there))
                lost = [one for one in found if one is not None]
                if not lost or await rollouter.trainer.remote.displaced() is not None:
                    raise
                which = f"{lost[0].stage}: {lost[0].cause}"
                actor_factory.notify(f"the first weight sync connects the others: {which}")
        return rollouter

    @property
    def engines(self) -> list[Remote]:
        """The current replicas' processes."""
        return [cast(StudentProxy, one.student).remote for one in self.replicas if one is not None]

    async def build(self) -> None:
        """See SingletonActor. Cancels the orders of an earlier object: the new one repeats them.

        No caller waits any more for the answers that an earlier object has asked for.
        """
        await self._cancel_starts()
        config = self.actor_factory.config
        calls = (
            Deadline(replica.student.name).within(
                config.supervision.timeout_s, "ending answers", replica.student.stop_evaluation()
            )
            for replica in filter(None, self.replicas)
        )
        await asyncio.gather(*calls, return_exceptions=True)  # a dead one has none
        stages = (self.queue, self.trainer, self.scorer)
        before = Predecessor(self.newest, self.rebuilds, behind=self.snapshots)
        args = (config, tuple(self.replicas), *stages, self.actor_factory.bundles, before)
        await self.remote.build(FACTORY, args, config.timeouts.engine_start_s)

    async def supply(self) -> None:
        """Starts the ordered replicas, several at once, until cancelled."""
        seen = 0
        async with asyncio.TaskGroup() as group:
            while True:
                for order in await self.proxy.replica_orders(seen):
                    seen = order.number
                    task = group.create_task(self._start(order), name=f"order {order.number}")
                    self._starting.add(task)
                    task.add_done_callback(self._starting.discard)

    async def _start(self, order: Order) -> None:
        index = order.index
        self.incarnations[index] += 1
        if (old := self.replicas[index]) is not None:  # the answer to a cancelled order, perhaps
            old.student.kill()
        answer: StartedReplica | StageError
        try:
            student = await self.actor_factory.student(index, self.queue, self.incarnations[index])
            try:
                answer = StartedReplica(student, await student.ready())
            except BaseException:
                student.kill()
                raise
            self.replicas[index] = answer
            self.rebuilds += 1
        except StageError as error:
            answer = error
        await self.proxy.deliver(order.number, answer)

    async def _cancel_starts(self) -> None:
        starting = set(self._starting)
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)

    async def stop(self, timeout_s: float) -> None:
        """Ends supervision; the replicas go on."""
        await self.remote.call("shutdown", timeout_s=timeout_s)

    async def halt_replicas(self, timeout_s: float) -> None:
        """Stops every replica, and forgets the newest weights, before a new trainer begins.

        Those on the trainer's GPUs sleep then, so that the next trainer finds room there. A replica
        that does not stop or sleep in time is killed; the next actor orders another one.
        """
        await self._cancel_starts()
        self.newest = self.verified = None
        stopping = (self._stopped(index, timeout_s) for index in range(len(self.replicas)))
        await gather_or_cancel(*stopping)

    async def _stopped(self, index: int, timeout_s: float) -> None:
        replica, rollout = self.replicas[index], self.actor_factory.config.rollout
        if replica is None:
            return
        try:
            async with Bound(timeout_s):
                await replica.student.stop()
                if rollout.host is not None and index < rollout.max_replicas:
                    await replica.student.sleep()
        except (StageError, TimeoutError):
            replica.student.kill()

    # ── weights ────────────────────────────────────────────────────────────────────────────────

    def refresh_teachers(self, newest: dict[str, TeacherWeights]) -> None:
        """From now on refreshes teachers that are the student itself, if there are any.

        ``newest`` gets the weights of each, for a scoring stage that is restarted.
        """
        config = self.actor_factory.config
        if not (every := config.refreshes):
            return

        async def load(teacher: str, version: int, directory: str) -> None:
            newest[teacher] = weights = TeacherWeights(
                version, directory, config.timeouts.engine_start_s
            )
            await self.scorer.load(teacher, weights)

        run_dir = Path(config.run_dir or ".").absolute()
        store = Checkpoints.of(config, run_dir, ())
        copies = WeightCopies(
            run_dir / "teachers",
            Path(config.student.model),
            lambda: [config.version_after(step) for step in store.begun()],
        )
        notify = self.actor_factory.notify
        self.refresh = TeacherRefresh(every, self.trainer.save, load, copies, notify)

    async def snapshot(self, version: int, again: bool = False) -> None:
        """See WeightSync. ``newest`` is None meanwhile: the trainer may have either snapshot."""
        self.newest, self.snapshots = None, True
        self.newest = version, await self.proxy.snapshot(version)
        if self.refresh is not None:
            await self.refresh.copy(version, again)

    async def push(self) -> SyncReport:
        """See WeightSync. Teachers have their weights before the replicas have theirs."""
        metrics = await self.refresh.load() if self.refresh is not None else {}
        report = await self.proxy.push()
        self.verified = self.newest
        return replace(report, metrics={**report.metrics, **metrics})

    async def write_verified(self, directory: str, bound_s: float) -> tuple[str, str]:
        """Lets a rollout replica write the ``verified`` weights to a folder below the directory.

        Returns the folder, and the replica's name with their dtypes. StageError with what each
        replica lacks. The first sync of a run, too, verifies weights.
        """
        assert self.verified is not None
        _, meta = self.verified
        sent, faults = dict(zip(meta.names, meta.digests, strict=True)), list[str]()
        most = self.actor_factory.config.rollout.max_replicas
        for index, one in enumerate(self.replicas[:most]):
            if one is None:
                continue
            student = one.student
            folder = str(Path(directory) / str(index))  # one that is late still writes to its own
            try:
                writing = student.write_weights(folder, sent)
                what = "writing its weights"
                others = await Deadline(student.name).within(bound_s, what, writing)
            except StageError as error:
                faults.append(f"{student.name}: {error.cause}")
                continue
            if not others:
                return folder, f"{student.name} ({', '.join(sorted(set(meta.dtype_names)))})"
            faults.append(
                f"{student.name} has other weights in {len(others)} of {len(sent)} tensors "
                f"({others[0]}), perhaps of a sync that broke off, or was not compared yet"
            )
        raise StageError("rollouter", "; ".join(faults) or "no replica exists")


async def _ready(
    student: StudentProxy | None, actor_factory: ActorFactory
) -> StartedReplica | None:
    """None for one whose machine is lost: the stage orders another one."""
    if student is None:
        return None
    try:
        return StartedReplica(student, await student.ready())
    except StageError:
        if (lost := await student.displaced()) is None:
            raise
        actor_factory.drop(student.remote)
        actor_factory.notify(f"{lost.stage}: it is started later: {lost.cause}")
        return None
