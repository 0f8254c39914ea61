"""A teacher's replicas: who serves, and what becomes of one that fails.

They are pushed and probed members (``async_opd.processes.members``): whoever calls one reports its
failure. It gets no work until it has proved itself, since one that fails fast would attract all of
it. An engine that is dead, fails its probes or misses the newest weights is rebuilt; a server is
probed until ``health.patience_s`` is over. Without any replica left, work fails with a name instead
of waiting.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from async_opd.config.run_config import EndpointHealth, HealthConfig, SupervisionConfig
from async_opd.core.batch import Batch
from async_opd.core.deadline import Deadline, Timer
from async_opd.core.errors import NoReplica, StageError, StageTimeout
from async_opd.core.offload import offload
from async_opd.core.stages import StageReport
from async_opd.processes.members import Event, Member, MemberSet, Policy, State
from teachers.answers import check
from teachers.balancer import Balancer, Reservation
from teachers.protocols import RebuildTeacher, Reloadable, ScoringReplica, Sleepable, TeacherWeights

Result = TypeVar("Result")

Health = HealthConfig | EndpointHealth

IN_FLIGHT = 2
"""Batches in flight per replica: one in the engine, one behind it."""
REPORT_S = 10.0
"""A replica that does not report in time is left out of this report."""


class ReplicaSlots:
    """Of one teacher. ``probe_batch`` is one rollout that could be scored, for probes."""

    def __init__(
        self,
        teacher: str,
        replicas: Sequence[ScoringReplica],
        health: Health,
        rebuild: RebuildTeacher | None = None,
        supervision: SupervisionConfig | None = None,
        *,
        asleep: bool = False,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``asleep``: the replicas are, and work only between ``wake`` and ``sleep``."""
        self.probe_batch: Batch | None = None
        self.failures = 0.0
        self.tokens = 0  # of calls that succeeded
        self.weights: TeacherWeights | None = None
        self.asleep = asleep
        self.name = f"teacher {teacher}"
        self.health = health
        self.clock = clock
        self._teacher = teacher
        self._rebuild = rebuild
        self._deadline = Deadline(self.name, timer)
        self._last_cause = ""
        self._successes: Counter[str] = Counter()
        self._stale: set[Member[ScoringReplica]] = (
            set()
        )  # without the newest weights: to be rebuilt
        self._is_engine = isinstance(health, HealthConfig)
        policy = Policy[ScoringReplica](
            supervision=supervision or SupervisionConfig(),
            probe=self._probe,
            probes=health.probes if isinstance(health, HealthConfig) else math.inf,
            patience_s=health.patience_s if isinstance(health, EndpointHealth) else math.inf,
            rebuild=self._rebuilt if rebuild is not None and self._is_engine else None,
            reached=lambda member: self._successes[member.name],
        )
        named = {f"{self.name}/{index}": replica for index, replica in enumerate(replicas)}
        self.members = MemberSet(self.name, named, policy, timer, clock)
        self.balancer = Balancer(self.members.all, IN_FLIGHT, name=self.name)
        self.members.listen(self._follow)

    @property
    def replicas(self) -> list[ScoringReplica]:
        """All of them, also those that do not serve."""
        return [member.value for member in self.members.all]

    def _follow(self, event: Event) -> None:
        """Work goes to members that serve."""
        follow = {
            State.EJECTED: self.balancer.eject,
            State.SERVING: self.balancer.restore,
            State.GONE: self.balancer.remove,
        }
        if event.after in follow:
            follow[event.after](self.members[event.member])
        self._last_cause = event.cause or self._last_cause

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        place: Reservation[Member[ScoringReplica]],
        what: str,
        work: Callable[[ScoringReplica], Coroutine[Any, Any, Result]],
        least_s: float = 0.0,
    ) -> Result:
        """Within its bound, or ``least_s``; gives the place back. What fails is the replica's."""
        member, number = place.replica, place.replica.incarnation
        try:
            bound = max(least_s, self._bound(place.outstanding))
            called = work(member.value)
            result = await self._deadline.within(bound, f"{what} on /{member.index}", called)
        except Exception as error:
            self._failed(member, number, error)
            raise
        finally:
            self.balancer.release(place)
        self.tokens += place.tokens
        self._successes[member.name] += 1
        return result

    def _bound(self, tokens: int) -> float:
        """Seconds that a call may take on a replica with so many tokens outstanding."""
        return self.health.timeout_s + tokens / self.health.min_tokens_per_s

    def _failed(self, member: Member[ScoringReplica], incarnation: int, error: Exception) -> None:
        self.failures += 1
        self.members.fail(member, incarnation, error)

    def all_gone(self) -> NoReplica:
        """The error of work that nobody is left for."""
        return NoReplica(
            self.name,
            f"all {len(self.members.all)} replicas are gone; the last failure: {self._last_cause}",
            "see run.log for what became of each, and Ray's session directory for their logs",
        )

    # ── health ─────────────────────────────────────────────────────────────────────────────────

    async def _probe(self, member: Member[ScoringReplica]) -> Exception | None:
        """See Policy: an engine that is dead, or without the newest weights, has to be rebuilt."""
        if member in self._stale:
            raise StageError(member.name, "it does not have the newest weights")
        ready = member.value.ready()
        failure = await self._error(self.health.timeout_s, "a sign of life", ready)
        if failure is not None and self._is_engine:
            raise failure
        if failure is None and self.probe_batch is not None:
            work = score_checked(self.name, self.probe_batch, member.value)
            failure = await self._error(self._bound(tokens_of(self.probe_batch)), "a probe", work)
        if member in self._stale:  # new weights came meanwhile
            raise StageError(member.name, "it does not have the newest weights")
        return failure

    async def _error(
        self, bound: float, what: str, work: Coroutine[Any, Any, Any]
    ) -> Exception | None:
        try:
            await self._deadline.within(bound, what, work)
        except Exception as error:
            return error
        return None

    async def _rebuilt(self, member: Member[ScoringReplica]) -> ScoringReplica:
        """Another replica in its place, with the newest weights."""
        assert self._rebuild is not None
        # from now on this is what the next try ends
        replica = member.value = await self._rebuild(self._teacher, member.index, member.value)
        taken = None
        while taken is not self.weights:
            taken = self.weights
            assert taken is not None
            await self._take(replica, taken)
        self._stale.discard(member)
        return replica

    async def load(self, weights: TeacherWeights) -> None:
        """New weights for all replicas. One that does not take them is rebuilt, and takes them."""
        self.weights = weights
        self._stale.update(self.members.all)
        await asyncio.gather(*(self._load(member, weights) for member in self.members.serving))

    async def _load(self, member: Member[ScoringReplica], weights: TeacherWeights) -> None:
        number = member.incarnation
        try:
            await self._take(member.value, weights)
        except Exception as error:
            self._failed(member, number, error)
        else:
            if member.serves(number) and weights is self.weights:
                self._stale.discard(member)

    async def _take(self, replica: ScoringReplica, weights: TeacherWeights) -> None:
        assert isinstance(replica, Reloadable)
        work = replica.load(weights.directory)  # after what is in the engine
        before = max(self.balancer.outstanding_tokens, default=0) / self.health.min_tokens_per_s
        await self._deadline.within(weights.timeout_s + before, "loading weights", work)

    # ── turns ──────────────────────────────────────────────────────────────────────────────────

    async def wake(self) -> None:
        """The replicas have their GPUs; one that does not wake has failed, as any."""
        self.asleep = False
        await self._each("waking up", lambda replica: replica.wake())

    async def sleep(self) -> None:
        """Waits for what is being mended, then all replicas leave their GPUs."""
        members, failed = self.members, True
        while failed:
            await members.until(lambda: members.serving == members.left)
            failed = await self._each("going to sleep", lambda replica: replica.sleep())
        self.asleep = True

    async def sleep_serving(self) -> None:
        """All that serve leave their GPUs, whichever stage woke them; a mend is not waited for."""
        await self._each("going to sleep", lambda replica: replica.sleep())
        self.asleep = True

    async def _each(
        self, what: str, work: Callable[[Sleepable], Coroutine[Any, Any, None]]
    ) -> bool:
        """Does it with every replica that serves. Whether one failed."""

        async def one(member: Member[ScoringReplica]) -> bool:
            number, replica = member.incarnation, member.value
            assert isinstance(replica, Sleepable)
            error = await self._error(self.health.timeout_s, what, work(replica))
            if error is not None:
                self._failed(member, number, error)
            return error is not None

        return any(await asyncio.gather(*map(one, self.members.serving)))

    # ── what is going on ───────────────────────────────────────────────────────────────────────

    async def reports(self) -> list[StageReport]:
        """Of those that serve, and answer in time."""
        parts = await asyncio.gather(*map(self._part, self.members.serving))
        return [part for part in parts if part is not None]

    async def _part(self, member: Member[ScoringReplica]) -> StageReport | None:
        number, report = member.incarnation, member.value.report()
        try:
            return await self._deadline.within(REPORT_S, "a report", report)
        except StageTimeout:
            return None
        except Exception as error:
            if not self.asleep:  # else it is found out, and mended, when it is its turn
                self._failed(member, number, error)
            return None


async def score_checked(name: str, batch: Batch, replica: ScoringReplica) -> Batch:
    """Its samples, checked."""
    samples = await replica.score(batch)
    await offload(samples.nbytes, check, name, batch, samples)
    return samples


def tokens_of(batch: Batch) -> int:
    """Prompts and responses."""
    return sum(header.tokens for header in batch.headers)
