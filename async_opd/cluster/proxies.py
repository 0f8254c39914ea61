"""The stages' Protocols over Ray: each method of a proxy is one call to the stage's own method.

A proxy's methods have the types of the stage class that they name: a method that is renamed or gets
other arguments there is a type error here, or where the proxy is used.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from async_opd.cluster.remote import Remote
from async_opd.cluster.rollouter_actor import RollouterService
from async_opd.core.errors import Displaced
from async_opd.core.stages import TRAINER
from async_opd.queue.message_queue import MessageQueue
from async_opd.waiting.deadline import Deadline
from teachers.stage import ScorerStage

if TYPE_CHECKING:
    from rollouter.replica import StudentReplica
    from teachers.replica import TeacherReplica
    from trainer.replay.replayer import Replayer
    from trainer.stage import TrainerStage
else:  # their modules load vLLM and torch, which only their own processes need

    class _Names:
        """Stands for a class of which only the methods' names are needed."""

        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(__name__=name)

    StudentReplica = TeacherReplica = TrainerStage = Replayer = _Names()

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

NO_TIMEOUT = float("inf")
"""For calls that wait for work, which the pipeline's stall bound covers, and for calls that the
caller bounds."""


class Proxy:
    """A stage whose object lives in the process of ``remote``."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    @property
    def start_s(self) -> float | None:
        """See Remote.start_s."""
        return self.remote.start_s

    async def displaced(self) -> Displaced | None:
        """See Remote.displaced."""
        return await self.remote.displaced()

    def kill(self) -> None:
        """Ends the process and its children."""
        self.remote.kill()


def remote(
    method: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Answer]],
    timeout_s: float | None = None,
    again: bool = False,
) -> Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Answer]]:
    """A proxy's method: calls ``method`` of the object in the proxy's process.

    ``timeout_s`` None is the process's own bound. ``again``: the call outlives the process, and
    waits until it is restarted. Raises what ``Remote.call`` raises.
    """
    name = method.__name__

    def call(
        proxy: Proxy, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Coroutine[Any, Any, Answer]:
        return proxy.remote.call(name, *args, timeout_s=timeout_s, retry=again, **kwargs)

    return call


class QueueProxy(Proxy):
    """``async_opd.core.stages.Queue`` in the queue actor. Batches travel by value."""

    put = remote(MessageQueue.put, NO_TIMEOUT, again=True)
    get = remote(MessageQueue.get, NO_TIMEOUT, again=True)
    fetch = remote(MessageQueue.fetch, again=True)
    ack = remote(MessageQueue.ack, again=True)
    renew = remote(MessageQueue.renew, again=True)
    headers = remote(MessageQueue.headers)
    contents = remote(MessageQueue.contents)
    score_again = remote(MessageQueue.score_again, again=True)
    payload_store = remote(MessageQueue.payload_store, NO_TIMEOUT, again=True)
    release = remote(MessageQueue.release, again=True)
    keep_media = remote(MessageQueue.keep_media, again=True)
    media = remote(MessageQueue.media, again=True)
    drop_media = remote(MessageQueue.drop_media, again=True)
    media_stats = remote(MessageQueue.media_stats, again=True)
    stats = remote(MessageQueue.stats, again=True)
    events = remote(MessageQueue.events, NO_TIMEOUT, again=True)


class StudentProxy(Proxy):
    """A student replica: for the rollout stage and, as a receiver, for the weight sync.

    The callers bound their calls: supervision, the weight sync, GPU time sharing.
    """

    def __init__(self, remote: Remote, consumer: str) -> None:
        super().__init__(remote)
        self.name = remote.name
        self.consumer = consumer

    run = remote(StudentReplica.run, NO_TIMEOUT)
    generate = remote(StudentReplica.generate, NO_TIMEOUT)
    progress = remote(StudentReplica.progress, NO_TIMEOUT)
    report = remote(StudentReplica.report, NO_TIMEOUT)
    stop = remote(StudentReplica.stop, NO_TIMEOUT)
    stop_evaluation = remote(StudentReplica.stop_evaluation, NO_TIMEOUT)
    alive = remote(StudentReplica.alive, NO_TIMEOUT)
    ready = remote(StudentReplica.ready)
    join = remote(StudentReplica.join, NO_TIMEOUT)
    pause = remote(StudentReplica.pause, NO_TIMEOUT)
    receive = remote(StudentReplica.receive, NO_TIMEOUT)
    write_weights = remote(StudentReplica.write_weights, NO_TIMEOUT)
    finish = remote(StudentReplica.finish, NO_TIMEOUT)
    resume = remote(StudentReplica.resume, NO_TIMEOUT)
    evidence = remote(StudentReplica.evidence, NO_TIMEOUT)
    idle = remote(StudentReplica.idle, NO_TIMEOUT)
    sleep = remote(StudentReplica.sleep, NO_TIMEOUT)
    wake = remote(StudentReplica.wake, NO_TIMEOUT)


class RollouterProxy(Proxy):
    """``async_opd.core.stages.Rollouter`` in its actor, whose calls to replicas have bounds."""

    run = remote(RollouterService.run, NO_TIMEOUT, again=True)
    generate = remote(RollouterService.generate, NO_TIMEOUT, again=True)
    progress = remote(RollouterService.progress, NO_TIMEOUT, again=True)
    events = remote(RollouterService.events, NO_TIMEOUT, again=True)
    report = remote(RollouterService.report, again=True)
    connect = remote(RollouterService.connect, NO_TIMEOUT)
    snapshot = remote(RollouterService.snapshot, NO_TIMEOUT, again=True)
    push = remote(RollouterService.push, NO_TIMEOUT, again=True)
    replica_orders = remote(RollouterService.replica_orders, NO_TIMEOUT, again=True)
    deliver = remote(RollouterService.deliver, NO_TIMEOUT, again=True)


class TeacherProxy(Proxy):
    """A teacher replica, for the scoring stage, which bounds calls by their tokens."""

    score = remote(TeacherReplica.score, NO_TIMEOUT)
    generate = remote(TeacherReplica.generate, NO_TIMEOUT)
    report = remote(TeacherReplica.report)
    ready = remote(TeacherReplica.ready)
    sleep = remote(TeacherReplica.sleep, NO_TIMEOUT)
    wake = remote(TeacherReplica.wake, NO_TIMEOUT)
    load = remote(TeacherReplica.load, NO_TIMEOUT)


class ScorerProxy(Proxy):
    """``async_opd.core.stages.TeacherScorer`` in its actor; the pools there have bounds."""

    run = remote(ScorerStage.run, NO_TIMEOUT, again=True)
    generate = remote(ScorerStage.generate, NO_TIMEOUT, again=True)
    wait_asleep = remote(ScorerStage.wait_asleep, NO_TIMEOUT, again=True)
    wait_for_work = remote(ScorerStage.wait_for_work, NO_TIMEOUT, again=True)
    wait_for_backlog = remote(ScorerStage.wait_for_backlog, NO_TIMEOUT, again=True)
    take_turn = remote(ScorerStage.take_turn, NO_TIMEOUT, again=True)
    load = remote(ScorerStage.load, NO_TIMEOUT, again=True)
    progress = remote(ScorerStage.progress, NO_TIMEOUT, again=True)
    events = remote(ScorerStage.events, NO_TIMEOUT, again=True)
    report = remote(ScorerStage.report, again=True)


def bounded_by_bytes(
    method: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Answer]],
) -> Callable[Concatenate[TrainerProxy, Arguments], Coroutine[Any, Any, Answer]]:
    """A method of the trainer's proxy that may last ``state_s``. StageTimeout."""
    unbounded = remote(method, NO_TIMEOUT)

    async def call(
        proxy: TrainerProxy, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        work = unbounded(proxy, *args, **kwargs)
        return await Deadline(TRAINER).within(proxy.state_s, method.__name__, work, SLOW_DISK)

    return call


SLOW_DISK = (
    "lower checkpoint.min_mib_per_s, or raise checkpoint.timeout_s, if the run directory's disk is "
    "so slow; otherwise it hangs"
)


class TrainerProxy(Proxy):
    """``async_opd.core.stages.Trainer``, and the sender of the weight sync.

    ``state_s`` bounds calls that read or write all that the trainer has
    (``checkpoint.bounds``). The callers bound the others: the driver checkpoints, the weight sync
    and GPU time sharing.
    """

    def __init__(self, remote: Remote, state_s: float) -> None:
        super().__init__(remote)
        self.state_s = state_s

    step = remote(TrainerStage.step, NO_TIMEOUT)
    drop = remote(TrainerStage.drop)
    save = bounded_by_bytes(TrainerStage.save)
    capture = remote(TrainerStage.capture, NO_TIMEOUT)
    checkpoint = remote(TrainerStage.checkpoint, NO_TIMEOUT)
    restore = bounded_by_bytes(TrainerStage.restore)
    adopt = bounded_by_bytes(TrainerStage.adopt)
    supervise = remote(TrainerStage.supervise, NO_TIMEOUT)
    forget_moments = remote(TrainerStage.forget_moments)
    scale_learning_rate = remote(TrainerStage.scale_learning_rate)
    progress = remote(TrainerStage.progress, NO_TIMEOUT)
    report = remote(TrainerStage.report)
    open = remote(TrainerStage.open, NO_TIMEOUT)
    connect = remote(TrainerStage.connect, NO_TIMEOUT)
    snapshot = remote(TrainerStage.snapshot, NO_TIMEOUT)
    send = remote(TrainerStage.send, NO_TIMEOUT)
    idle = remote(TrainerStage.idle, NO_TIMEOUT)
    sleep = remote(TrainerStage.sleep, NO_TIMEOUT)
    wake = remote(TrainerStage.wake, NO_TIMEOUT)
    wait_asleep = remote(TrainerStage.wait_asleep, NO_TIMEOUT)
    wait_for_work = remote(TrainerStage.wait_for_work, NO_TIMEOUT)
    wait_for_backlog = remote(TrainerStage.wait_for_backlog, NO_TIMEOUT)
    take_turn = remote(TrainerStage.take_turn, NO_TIMEOUT)
    begin_turn = remote(TrainerStage.begin_turn, NO_TIMEOUT)


class ReplayerProxy(Proxy):
    """Computes kept steps again; its caller bounds the calls."""

    start = remote(Replayer.start, NO_TIMEOUT)
    step = remote(Replayer.step, NO_TIMEOUT)
    progress = remote(Replayer.progress)
