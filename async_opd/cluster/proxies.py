"""The stages' Protocols over Ray: each proxy turns a method call into one remote call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import cast

from async_opd.cluster.host import Remote
from async_opd.core.batch import Batch
from async_opd.core.lease import Ack, Lease, TopicStats
from async_opd.core.patience import Progress
from async_opd.core.samples import Header, Prompt, Rollout
from async_opd.core.stages import Captured, News, SamplingSpec, StageReport, StepReport
from async_opd.core.weights import Rendezvous, WeightMeta
from teachers.replicas import Weights

ENDLESS = float("inf")
"""For calls that wait for work; the pipeline's stall bound covers them."""


class QueueProxy:
    """``async_opd.core.stages.Queue`` in the queue actor. Batches travel by value.

    Outlives the actor's process: calls wait until it is restarted.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def put(self, topic: str, batch: Batch) -> None:
        """See MessageQueue.put."""
        await self._remote.call_again("put", topic, batch, timeout_s=ENDLESS)

    async def get(
        self,
        topic: str,
        at_most: int,
        at_least: int = 1,
        ack: Ack = None,
        consumer: str = "",
        share: bool = False,
        tokens: int | None = None,
    ) -> Lease:
        """See MessageQueue.get."""
        args = (topic, at_most, at_least, ack, consumer, share, tokens)
        return cast(Lease, await self._remote.call_again("get", *args, timeout_s=ENDLESS))

    async def ack(self, topic: str, lease_id: int) -> None:
        """See MessageQueue.ack."""
        await self._remote.call_again("ack", topic, lease_id)

    async def renew(self, leases: Mapping[str, Sequence[int]]) -> float:
        """See MessageQueue.renew."""
        return float(await self._remote.call_again("renew", leases))

    async def nack(self, topic: str, lease_id: int) -> bool:
        """See MessageQueue.nack."""
        return bool(await self._remote.call_again("nack", topic, lease_id))

    async def headers(self, topic: str) -> tuple[Header, ...]:
        """See MessageQueue.headers."""
        return cast(tuple[Header, ...], await self._remote.call("headers", topic))

    async def contents(self, topic: str, uids: Collection[str]) -> tuple[Batch, ...]:
        """See MessageQueue.contents."""
        return cast(tuple[Batch, ...], await self._remote.call("contents", topic, uids))

    async def release(self, topic: str, consumer: str) -> int:
        """See MessageQueue.release."""
        return int(await self._remote.call_again("release", topic, consumer))

    async def stats(self) -> dict[str, TopicStats]:
        """See MessageQueue.stats."""
        return cast(dict[str, TopicStats], await self._remote.call_again("stats"))

    async def news(self, heard: int, wait: bool = True) -> News:
        """See MessageQueue.news."""
        found = await self._remote.call_again("news", heard, wait, timeout_s=ENDLESS)
        return cast(News, found)


class HostProxy:
    """``async_opd.core.turns.Host``: who shares its GPUs with teachers. The turns have bounds."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def idle(self) -> None:
        """See async_opd.core.turns.Host."""
        await self._remote.call("idle", timeout_s=ENDLESS)

    async def rest(self) -> None:
        """See async_opd.core.turns.Host."""
        await self._remote.call("rest", timeout_s=ENDLESS)

    async def wake(self) -> None:
        """See async_opd.core.turns.Host."""
        await self._remote.call("wake", timeout_s=ENDLESS)

    async def progress(self) -> Progress:
        """See async_opd.core.turns.Host; bounded by who asks."""
        return cast(Progress, await self._remote.call("progress", timeout_s=ENDLESS))


class StudentProxy(HostProxy):
    """A student replica: for the rollout stage and, as a receiver, for the weight sync.

    Whoever calls has bounds: supervision's, or those of the sync.
    """

    def __init__(self, remote: Remote, consumer: str) -> None:
        super().__init__(remote)
        self.name = remote.name
        self.consumer = consumer

    async def run(self) -> None:
        """See StudentReplica.run; ended by the pool's heartbeat if it hangs."""
        await self._remote.call("run", timeout_s=ENDLESS)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """See StudentReplica.generate."""
        rollouts = await self._remote.call("generate", prompts, sampling, timeout_s=ENDLESS)
        return cast(list[Rollout], rollouts)

    async def report(self) -> StageReport:
        """See StudentReplica.report."""
        return cast(StageReport, await self._remote.call("report", timeout_s=ENDLESS))

    async def stop(self) -> None:
        """See StudentReplica.stop."""
        await self._remote.call("stop", timeout_s=ENDLESS)

    async def alive(self) -> None:
        """See StudentReplica.alive."""
        await self._remote.call("alive", timeout_s=ENDLESS)

    def kill(self) -> None:
        """Ends the process and its children."""
        self._remote.kill()

    async def ready(self) -> int:
        """See StudentReplica.ready."""
        return cast(int, await self._remote.call("ready"))

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        """See StudentReplica.join."""
        await self._remote.call("join", rendezvous, rank_offset, timeout_s=ENDLESS)

    async def pause(self, on_sync: str) -> None:
        """See StudentReplica.pause."""
        await self._remote.call("pause", on_sync, timeout_s=ENDLESS)

    async def receive(self, meta: WeightMeta) -> None:
        """See StudentReplica.receive."""
        await self._remote.call("receive", meta, timeout_s=ENDLESS)

    async def finish(self, version: int) -> None:
        """See StudentReplica.finish."""
        await self._remote.call("finish", version, timeout_s=ENDLESS)

    async def resume(self) -> None:
        """See StudentReplica.resume."""
        await self._remote.call("resume", timeout_s=ENDLESS)


class TeacherProxy:
    """A teacher replica, for the scoring stage."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def score(self, batch: Batch) -> Batch:
        """See TeacherReplica.score; the scoring stage bounds it by its tokens."""
        return cast(Batch, await self._remote.call("score", batch, timeout_s=ENDLESS))

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """See TeacherReplica.generate."""
        rollouts = await self._remote.call("generate", prompts, sampling, timeout_s=ENDLESS)
        return cast(list[Rollout], rollouts)

    async def report(self) -> StageReport:
        """See TeacherReplica.report."""
        return cast(StageReport, await self._remote.call("report"))

    async def ready(self) -> int:
        """See TeacherReplica.ready."""
        return cast(int, await self._remote.call("ready"))

    async def sleep(self) -> None:
        """See TeacherReplica.sleep; the pool bounds it."""
        await self._remote.call("sleep", timeout_s=ENDLESS)

    async def wake(self) -> None:
        """See TeacherReplica.wake; the pool bounds it."""
        await self._remote.call("wake", timeout_s=ENDLESS)

    async def load(self, directory: str) -> None:
        """See TeacherReplica.load; the pool bounds it."""
        await self._remote.call("load", directory, timeout_s=ENDLESS)

    def kill(self) -> None:
        """Ends the process and its children."""
        self._remote.kill()


class ScorerProxy:
    """``async_opd.core.stages.TeacherScorer`` in the scoring stage's actor.

    Outlives the actor's process: calls wait until it is restarted.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def run(self) -> None:
        """See ScorerStage.run."""
        await self._remote.call_again("run", timeout_s=ENDLESS)

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """See ScorerStage.generate."""
        rollouts = await self._remote.call_again(
            "generate", teacher, prompts, sampling, timeout_s=ENDLESS
        )
        return cast(list[Rollout], rollouts)

    async def asleep(self, host: str) -> None:
        """See ScorerStage.asleep."""
        await self._remote.call_again("asleep", host, timeout_s=ENDLESS)

    async def some(self, host: str) -> None:
        """See ScorerStage.some."""
        await self._remote.call_again("some", host, timeout_s=ENDLESS)

    async def full(self, host: str) -> None:
        """See ScorerStage.full."""
        await self._remote.call_again("full", host, timeout_s=ENDLESS)

    async def shift(self, host: str) -> None:
        """See ScorerStage.shift: its pools bound it."""
        await self._remote.call_again("shift", host, timeout_s=ENDLESS)

    async def load(self, teacher: str, weights: Weights) -> None:
        """See ScorerStage.load, which bounds it."""
        await self._remote.call_again("load", teacher, weights, timeout_s=ENDLESS)

    async def progress(self) -> Progress:
        """See ScorerStage.progress; bounded by who asks."""
        return cast(Progress, await self._remote.call_again("progress", timeout_s=ENDLESS))

    async def news(self, heard: int, wait: bool = True) -> News:
        """See ScorerStage.news."""
        found = await self._remote.call_again("news", heard, wait, timeout_s=ENDLESS)
        return cast(News, found)

    async def report(self) -> dict[str, StageReport]:
        """See ScorerStage.report."""
        return cast(dict[str, StageReport], await self._remote.call_again("report"))


class TrainerProxy(HostProxy):
    """``async_opd.core.stages.Trainer``, and the sender of the weight sync, which has bounds."""

    async def step(self) -> StepReport:
        """See TrainerStage.step."""
        return cast(StepReport, await self._remote.call("step", timeout_s=ENDLESS))

    async def drop(self, lost: str, others: Sequence[str] = ()) -> bool:
        """See TrainerStage.drop."""
        return cast(bool, await self._remote.call("drop", lost, others))

    async def save(self, directory: str) -> None:
        """See TrainerStage.save."""
        await self._remote.call("save", directory)

    async def capture(self) -> Captured:
        """See TrainerStage.capture; it waits for the step under way, and the driver bounds it."""
        return cast(Captured, await self._remote.call("capture", timeout_s=ENDLESS))

    async def checkpoint(self, directory: str, in_flight: frozenset[str]) -> None:
        """See TrainerStage.checkpoint; the driver bounds it."""
        await self._remote.call("checkpoint", directory, in_flight, timeout_s=ENDLESS)

    async def restore(self, directory: str) -> frozenset[str]:
        """See TrainerStage.restore."""
        return cast(frozenset[str], await self._remote.call("restore", directory))

    async def report(self) -> StageReport:
        """See TrainerStage.report."""
        return cast(StageReport, await self._remote.call("report"))

    async def open(self, wave: int, world_size: int) -> Rendezvous:
        """See TrainerStage.open."""
        return cast(
            Rendezvous, await self._remote.call("open", wave, world_size, timeout_s=ENDLESS)
        )

    async def connect(self, wave: int) -> None:
        """See TrainerStage.connect."""
        await self._remote.call("connect", wave, timeout_s=ENDLESS)

    async def snapshot(self, version: int) -> WeightMeta:
        """See TrainerStage.snapshot."""
        return cast(WeightMeta, await self._remote.call("snapshot", version, timeout_s=ENDLESS))

    async def send(self, wave: int) -> None:
        """See TrainerStage.send."""
        await self._remote.call("send", wave, timeout_s=ENDLESS)
