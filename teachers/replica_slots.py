"""A teacher's replicas as members: which of them serve, and how a replica that fails recovers.

``async_opd.processes.members`` has the states. A failed call ejects its replica. An ejected replica
gets no work until it passes its probe: a replica that fails fast has the shortest queue and would
attract all of it. An engine that is dead, fails its probes or lacks the newest weights is rebuilt;
a server is probed until ``health.patience_s`` is over. When no replica is left, calls raise
NoReplica.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.config.sections.teachers import EndpointHealth, HealthConfig
from async_opd.core.batch import Batch
from async_opd.core.errors import Displaced, RolloutFault, StageError, StageTimeout
from async_opd.core.reports import StageReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.processes.events import State
from async_opd.processes.members import Member, MemberSet, Places, Policy
from async_opd.waiting.deadline import Deadline, Timer, offload
from teachers.answers import check
from teachers.balancer import Balancer, Reservation


class ScoringReplica(Protocol):
    """The methods of a teacher replica that the pool needs."""

    async def score(self, batch: Batch) -> Batch: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def report(self) -> StageReport: ...

    async def ready(self) -> int: ...


class EngineReplica(ScoringReplica, Protocol):
    """A replica whose weights can change, and that can free its GPUs and take them back."""

    async def load(self, directory: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def kill(self) -> None:
        """Ends its process."""


@runtime_checkable
class EndpointClient(ScoringReplica, Protocol):
    """A replica that is a client of an external server."""

    async def close(self) -> None:
        """Closes its connections."""


@dataclass(frozen=True)
class TeacherWeights:
    """A version of the student's weights in a directory; ``timeout_s`` bounds loading it."""

    version: int
    directory: str
    timeout_s: float


class RebuildTeacher(Protocol):
    """Replaces replicas. ``async_opd.cluster`` implements it, since it can start processes."""

    async def __call__(self, teacher: str, index: int, old: Any) -> ScoringReplica:
        """Ends the old replica, if any, and starts another. Raises if either fails."""
        ...

    async def displaced(self, old: Any) -> Displaced | None:
        """The error of a replica that lost its machine or its GPUs; None of any other."""

    def places(self, teacher: str) -> Places | None:
        """The places of its replicas in the cluster; None where these stay on their machine."""

    async def close(self) -> None:
        """Ends every replica that this object started."""


Result = TypeVar("Result")

Health = HealthConfig | EndpointHealth

IN_FLIGHT = 2
"""Batches in flight per replica: one in the engine, and one that waits for it."""
REPORT_S = 10.0
"""Seconds for a report: a replica without one is left out of the pool's report."""


class ReplicaSlots:
    """The replicas of one teacher. ``probe_batch`` is a rollout that was scored, for probes."""

    def __init__(
        self,
        teacher: str,
        replicas: Sequence[ScoringReplica | None],
        health: Health,
        rebuild: RebuildTeacher | None = None,
        supervision: SupervisionConfig | None = None,
        *,
        asleep: bool = False,
        start_s: float = math.inf,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``asleep``: the replicas share GPUs, and sleep now.

        They work, and are probed and rebuilt, only in their turn: between ``wake`` and ``sleep``.
        A replica of None is absent: see MemberSet.
        ``start_s``: see Policy.
        """
        self.probe_batch: Batch | None = None
        self.tokens = 0  # those of calls that succeeded
        self.weights: TeacherWeights | None = None
        self._turn = asyncio.Event()
        if not asleep:
            self._turn.set()
        self.name = f"teacher {teacher}"
        self.health = health
        self.clock = clock
        self._teacher = teacher
        self._rebuild = rebuild
        self._deadline = Deadline(self.name, timer)
        self._successes: Counter[str] = Counter()
        self._loaded: dict[ScoringReplica, TeacherWeights] = {}
        self._is_engine = isinstance(health, HealthConfig)
        rebuilds = rebuild if self._is_engine else None
        policy = Policy[ScoringReplica](
            supervision=supervision or SupervisionConfig(),
            probe=self._probe,
            leave=self._leave,
            probes=health.probes if isinstance(health, HealthConfig) else math.inf,
            patience_s=health.patience_s if isinstance(health, EndpointHealth) else math.inf,
            displaced=None if rebuilds is None else lambda m: rebuilds.displaced(m.value),
            places=None if rebuilds is None else rebuilds.places(teacher),
            rebuild=None if rebuilds is None else self._rebuilt,
            reached=lambda member: self._successes[member.name],
            start_s=start_s,
        )
        named = {f"{self.name}/{index}": replica for index, replica in enumerate(replicas)}
        self.members = MemberSet(self.name, named, policy, timer, clock)
        self.balancer = Balancer(self.members, IN_FLIGHT)

    @property
    def replicas(self) -> list[ScoringReplica | None]:
        """The replicas of all members, also of those that do not serve; None if none ever did.

        A dead one has to be ended before its name is free in Ray.
        """
        return [member.value for member in self.members.all]

    @property
    def asleep(self) -> bool:
        """Whether others have the GPUs of these replicas."""
        return not self._turn.is_set()

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        reservation: Reservation[ScoringReplica],
        what: str,
        work: Callable[[ScoringReplica], Coroutine[Any, Any, Result]],
        least_s: float = 0.0,
        playing_s: float = 0.0,
    ) -> Result:
        """The result of the work, whose replica is ejected if it fails or is late.

        The longer of ``least_s`` and ``_bound`` limits its seconds, with ``playing_s`` more for
        environments. The reservation ends.
        """
        bound = max(least_s, self._bound(reservation.outstanding)) + playing_s
        try:
            result = await self.members.call(reservation.member, bound, what, work)
        finally:
            self.balancer.release(reservation)
        self.tokens += reservation.tokens
        self._successes[reservation.member.name] += 1
        return result

    async def _leave(self, member: Member[ScoringReplica]) -> None:
        """Waits for the calls in flight on a replica whose node drains; see Policy.leave."""
        if isinstance(member.failure, Displaced):
            bound = self._bound(sum(self.balancer.outstanding_tokens))
            with suppress(StageTimeout):
                idle = self.balancer.idle(member)
                await self._deadline.within(bound, "finishing its calls", idle)

    def _bound(self, tokens: int) -> float:
        """Seconds that a call may take on a replica with so many tokens outstanding."""
        return self.health.timeout_s + tokens / self.health.min_tokens_per_s

    # ── health ─────────────────────────────────────────────────────────────────────────────────

    async def _probe(self, member: Member[ScoringReplica]) -> Exception | None:
        """See Policy.probe. It raises for an engine that is dead, or lacks the newest weights."""
        await self._turn.wait()  # an engine that works or starts needs memory that others have now
        self._refuse_if_stale(member)
        ready = member.value.ready()
        failure = await self._error(self.health.timeout_s, "a health check", ready)
        if failure is not None and self._is_engine:
            raise failure
        if failure is None and self.probe_batch is not None:
            work = score_checked(self.name, self.probe_batch, member.value)
            failure = await self._error(self._bound(tokens_of(self.probe_batch)), "a probe", work)
            if isinstance(failure, RolloutFault):  # its image is gone by now: the replica answers
                self.probe_batch = failure = None
        self._refuse_if_stale(member)  # ``load`` may have set newer weights meanwhile
        return failure

    def _refuse_if_stale(self, member: Member[ScoringReplica]) -> None:
        if self._loaded.get(member.value) is not self.weights:
            version = None if self.weights is None else self.weights.version
            raise StageError(
                member.name, f"it has not loaded the newest weights, version {version}"
            )

    async def _error(
        self, bound: float, what: str, work: Coroutine[Any, Any, Any]
    ) -> Exception | None:
        try:
            await self._deadline.within(bound, what, work)
        except Exception as error:
            return error
        return None

    async def _rebuilt(self, member: Member[ScoringReplica]) -> ScoringReplica:
        """A new replica for the member, with the newest weights."""
        assert self._rebuild is not None
        await self._turn.wait()  # as in ``_probe``
        # ``member.value`` is set before the weights load: if loading fails, the next try ends it
        replica = member.value = await self._rebuild(self._teacher, member.index, member.value)
        while (weights := self.weights) is not self._loaded.get(replica):
            assert weights is not None
            load = self._load(replica, weights)
            await self._deadline.within(self._loading_s(weights), "loading weights", load)
        return replica

    async def load(self, weights: TeacherWeights) -> None:
        """Loads new weights into all replicas. A replica that fails to is rebuilt with them."""
        self.weights = weights
        bound = self._loading_s(weights)
        await self.members.ask(bound, "loading weights", lambda r: self._load(r, weights))

    async def _load(self, replica: ScoringReplica, weights: TeacherWeights) -> None:
        await cast(EngineReplica, replica).load(weights.directory)
        self._loaded[replica] = weights

    def _loading_s(self, weights: TeacherWeights) -> float:
        """Seconds for loading, those for the requests in its engine included."""
        before = max(self.balancer.outstanding_tokens, default=0)
        return weights.timeout_s + before / self.health.min_tokens_per_s

    # ── time sharing ───────────────────────────────────────────────────────────────────────────

    async def wake(self) -> None:
        """Begins their turn: wakes the replicas; one that does not wake is ejected."""
        self._turn.set()
        await self._each("waking up", lambda replica: replica.wake())

    async def sleep(self) -> None:
        """Waits until ejected replicas serve again, or have no place; then puts all to sleep."""
        members, failed = self.members, True
        while failed or members.serving != members.present:  # one came back meanwhile
            await members.until(lambda: members.serving == members.present)
            failed = await self._each("going to sleep", lambda replica: replica.sleep())
        self._turn.clear()

    async def rest(self) -> None:
        """Ends their turn at once: puts those that serve to sleep, and ends all others.

        Their GPUs are free then. Those that were ended are rebuilt in the next turn.
        """
        self._turn.clear()
        await self._each("going to sleep", lambda replica: replica.sleep())
        for member in self.members.all:
            if member.state is not State.SERVING:
                cast(EngineReplica, member.value).kill()

    async def _each(
        self, what: str, work: Callable[[EngineReplica], Coroutine[Any, Any, None]]
    ) -> bool:
        """Does the work with every replica that serves. Returns whether one failed."""
        serving = len(self.members.serving)
        done = await self.members.ask(
            self.health.timeout_s, what, lambda r: work(cast(EngineReplica, r))
        )
        return len(done) < serving

    async def reports(self) -> list[StageReport]:
        """The reports of the replicas that serve, and answer in time.

        A report of a sleeping replica that fails ejects no replica: ``wake`` finds out whether it
        works.
        """
        spare = Exception if self.asleep else StageTimeout
        found = await self.members.ask(REPORT_S, "a report", lambda r: r.report(), spare)
        return list(found.values())


async def score_checked(name: str, batch: Batch, replica: ScoringReplica) -> Batch:
    """The replica's samples of a batch, after ``teachers.answers.check``."""
    samples = await replica.score(batch)
    await offload(samples.nbytes, check, name, batch, samples)
    return samples


def tokens_of(batch: Batch) -> int:
    """Tokens of the batch, prompts and responses."""
    return sum(header.tokens for header in batch.headers)
