"""The stages' Protocols over Ray: each method of a proxy is one call to the stage's own method.

A proxy's methods have the types of the stage class that they name: a method that is renamed or gets
other arguments there is a type error here, or where the proxy is used.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from async_opd.cluster.host import Remote
from async_opd.core.queue import MessageQueue
from teachers.scorer import ScorerStage

if TYPE_CHECKING:
    from rollouter.replica import StudentReplica
    from teachers.replica import TeacherReplica
    from trainer.stage import TrainerStage
else:  # their modules load vLLM and torch, which only their own processes need

    class _Names:
        """Stands for a class of which only the methods' names are needed."""

        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(__name__=name)

    StudentReplica = TeacherReplica = TrainerStage = _Names()

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

ENDLESS = float("inf")
"""For calls that wait for work, which the pipeline's stall bound covers, and for calls that the
caller bounds."""


class Proxy:
    """A stage whose object lives in the process of ``remote``."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

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

    async def call(proxy: Proxy, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        make = proxy.remote.call_again if again else proxy.remote.call
        return cast(Answer, await make(name, *args, timeout_s=timeout_s, **kwargs))

    return call


class QueueProxy(Proxy):
    """``async_opd.core.stages.Queue`` in the queue actor. Batches travel by value."""

    put = remote(MessageQueue.put, ENDLESS, again=True)
    get = remote(MessageQueue.get, ENDLESS, again=True)
    ack = remote(MessageQueue.ack, again=True)
    renew = remote(MessageQueue.renew, again=True)
    nack = remote(MessageQueue.nack, again=True)
    headers = remote(MessageQueue.headers)
    contents = remote(MessageQueue.contents)
    release = remote(MessageQueue.release, again=True)
    stats = remote(MessageQueue.stats, again=True)
    news = remote(MessageQueue.news, ENDLESS, again=True)


class StudentProxy(Proxy):
    """A student replica: for the rollout stage and, as a receiver, for the weight sync.

    Whoever calls has bounds: supervision's, those of the sync, or those of the turns.
    """

    def __init__(self, remote: Remote, consumer: str) -> None:
        super().__init__(remote)
        self.name = remote.name
        self.consumer = consumer

    run = remote(StudentReplica.run, ENDLESS)
    generate = remote(StudentReplica.generate, ENDLESS)
    progress = remote(StudentReplica.progress, ENDLESS)
    report = remote(StudentReplica.report, ENDLESS)
    stop = remote(StudentReplica.stop, ENDLESS)
    alive = remote(StudentReplica.alive, ENDLESS)
    ready = remote(StudentReplica.ready)
    join = remote(StudentReplica.join, ENDLESS)
    pause = remote(StudentReplica.pause, ENDLESS)
    receive = remote(StudentReplica.receive, ENDLESS)
    finish = remote(StudentReplica.finish, ENDLESS)
    resume = remote(StudentReplica.resume, ENDLESS)
    idle = remote(StudentReplica.idle, ENDLESS)
    rest = remote(StudentReplica.rest, ENDLESS)
    wake = remote(StudentReplica.wake, ENDLESS)


class TeacherProxy(Proxy):
    """A teacher replica, for the scoring stage, which bounds calls by their tokens."""

    score = remote(TeacherReplica.score, ENDLESS)
    generate = remote(TeacherReplica.generate, ENDLESS)
    report = remote(TeacherReplica.report)
    ready = remote(TeacherReplica.ready)
    sleep = remote(TeacherReplica.sleep, ENDLESS)
    wake = remote(TeacherReplica.wake, ENDLESS)
    load = remote(TeacherReplica.load, ENDLESS)


class ScorerProxy(Proxy):
    """``async_opd.core.stages.TeacherScorer`` in its actor; the pools there have bounds."""

    run = remote(ScorerStage.run, ENDLESS, again=True)
    generate = remote(ScorerStage.generate, ENDLESS, again=True)
    asleep = remote(ScorerStage.asleep, ENDLESS, again=True)
    some = remote(ScorerStage.some, ENDLESS, again=True)
    full = remote(ScorerStage.full, ENDLESS, again=True)
    shift = remote(ScorerStage.shift, ENDLESS, again=True)
    load = remote(ScorerStage.load, ENDLESS, again=True)
    progress = remote(ScorerStage.progress, ENDLESS, again=True)
    news = remote(ScorerStage.news, ENDLESS, again=True)
    report = remote(ScorerStage.report, again=True)


class TrainerProxy(Proxy):
    """``async_opd.core.stages.Trainer``, and the sender of the weight sync.

    The driver bounds checkpoints, the sync its own parts, and the turns theirs.
    """

    step = remote(TrainerStage.step, ENDLESS)
    drop = remote(TrainerStage.drop)
    save = remote(TrainerStage.save)
    capture = remote(TrainerStage.capture, ENDLESS)
    checkpoint = remote(TrainerStage.checkpoint, ENDLESS)
    restore = remote(TrainerStage.restore)
    progress = remote(TrainerStage.progress, ENDLESS)
    report = remote(TrainerStage.report)
    open = remote(TrainerStage.open, ENDLESS)
    connect = remote(TrainerStage.connect, ENDLESS)
    snapshot = remote(TrainerStage.snapshot, ENDLESS)
    send = remote(TrainerStage.send, ENDLESS)
    idle = remote(TrainerStage.idle, ENDLESS)
    rest = remote(TrainerStage.rest, ENDLESS)
    wake = remote(TrainerStage.wake, ENDLESS)
