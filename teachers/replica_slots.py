"""A teacher's replicas: who serves, and what becomes of one that fails.

    serving ──fails──► ejected ──is dead, or fails its probes──► rebuilt ──fails──► gone
       ▲                  │ a probe succeeds                        │
       └──────────────────┴─────────────────────────────────────────┘

A replica that has failed once gets no work until it has proved itself: one that fails fast would
attract everything. Without any replica left, work fails with a name instead of waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from async_opd.config.run_config import EndpointHealth, HealthConfig
from async_opd.core.batch import Batch
from async_opd.core.deadline import Deadline, Timer
from async_opd.core.errors import NoReplica, StageError, StageTimeout
from async_opd.core.offload import offload
from async_opd.core.stages import StageReport
from teachers.answers import check
from teachers.balancer import Balancer, Reservation
from teachers.protocols import RebuildTeacher, Reloadable, ScoringReplica, Sleepable, TeacherWeights

Result = TypeVar("Result")

Health = HealthConfig | EndpointHealth

MAX_PROBE_DELAY_S = 30.0
"""Between two probes of a server that may be away for long."""
IN_FLIGHT = 2
"""Batches in flight per replica: one in the engine, one behind it."""
REPORT_S = 10.0
"""A replica that does not report in time is left out of this report."""


@dataclass(eq=False)
class ReplicaSlot:
    """A replica's place in the pool, whoever sits on it.

    ``rebuilds`` counts since it last succeeded at work. ``stale``: it did not take the newest
    weights, and must be rebuilt.
    """

    index: int
    replica: ScoringReplica
    recovering: bool = False
    gone: bool = False
    stale: bool = False
    rebuilds: int = 0


class ReplicaSlots:
    """Of one teacher. ``run`` mends replicas and never ends by itself.

    ``probe_batch`` is one rollout that could be scored, for probes.
    """

    def __init__(
        self,
        teacher: str,
        replicas: Sequence[ScoringReplica],
        health: Health,
        rebuild: RebuildTeacher | None,
        *,
        notify: Callable[[str], None],
        asleep: bool,
        timer: Timer | None,
        clock: Callable[[], float],
    ) -> None:
        """``asleep``: the replicas are, and work only between ``wake`` and ``sleep``.

        ``notify`` hears what became of whom.
        """
        self.probe_batch: Batch | None = None
        self._notify = notify
        self.failures = self.rebuilds = 0.0
        self.tokens = 0  # of calls that succeeded
        self.weights: TeacherWeights | None = None
        self.asleep = asleep
        self._teacher = teacher
        self._name = f"teacher {teacher}"
        self._health = health
        self._max_rebuilds = health.rebuilds if isinstance(health, HealthConfig) and rebuild else 0
        self._rebuild = rebuild
        self._deadline = Deadline(self._name, timer)
        self._clock = clock
        self._slots = [ReplicaSlot(index, replica) for index, replica in enumerate(replicas)]
        self.balancer = Balancer(self._slots, IN_FLIGHT, name=self._name)
        self._ejected: asyncio.Queue[ReplicaSlot] = asyncio.Queue()
        self._last_failure = ""
        self._all_recovered = asyncio.Event()  # nothing is being mended
        self._all_recovered.set()

    @property
    def replicas(self) -> list[ScoringReplica]:
        """All of them, also those that do not serve."""
        return [slot.replica for slot in self._slots]

    async def run(self) -> None:
        """Mends replicas as they fail."""
        async with asyncio.TaskGroup() as group:
            while True:
                slot = await self._ejected.get()
                group.create_task(self._recover(slot), name=f"mend {self._name}/{slot.index}")

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        place: Reservation[ReplicaSlot],
        what: str,
        work: Callable[[ScoringReplica], Coroutine[Any, Any, Result]],
        least_s: float = 0.0,
    ) -> Result:
        """Within its bound, or ``least_s``; gives the place back. What fails is the replica's."""
        slot, replica = place.replica, place.replica.replica
        try:
            bound = max(least_s, self._bound(place.outstanding))
            result = await self._deadline.within(bound, f"{what} on /{slot.index}", work(replica))
            self.tokens += place.tokens
            return result
        except Exception as error:
            self._failed(slot, replica, error)
            raise
        finally:
            self.balancer.release(place)

    def _bound(self, tokens: int) -> float:
        """Seconds that a call may take on a replica with so many tokens outstanding."""
        return self._health.timeout_s + tokens / self._health.min_tokens_per_s

    # ── health ─────────────────────────────────────────────────────────────────────────────────

    def _failed(self, slot: ReplicaSlot, replica: ScoringReplica, error: Exception) -> None:
        """Takes the replica out, until it has proved itself."""
        self.failures += 1
        self._last_failure = one_line(error)
        if slot.recovering or slot.replica is not replica:
            return  # known already, or a late answer of one that has been replaced
        slot.recovering = True
        self._all_recovered.clear()
        self.balancer.eject(slot)
        self._note(slot, f"ejected: {self._last_failure}")
        self._ejected.put_nowait(slot)

    async def _recover(self, slot: ReplicaSlot) -> None:
        """Until the replica serves again, itself or another in its place, or is given up."""
        if isinstance(self._health, EndpointHealth):
            await self._wait_for_server(slot, self._health.patience_s)
        else:
            await self._probe_or_replace(slot, self._health.probes)

    async def _wait_for_server(self, slot: ReplicaSlot, patience_s: float) -> None:
        """Probes a server that nobody here can rebuild, each time later."""
        failed, deadline = 0, self._clock() + patience_s
        while self._clock() < deadline:
            await self._deadline.pause(min(self._delay(failed), MAX_PROBE_DELAY_S))
            if await self._is_alive(slot) and await self._passes_probe(slot):
                self._restore(slot, "serves again")
                return
            failed += 1
        self._remove(slot)

    async def _probe_or_replace(self, slot: ReplicaSlot, probes: int) -> None:
        """Probes the replica, each time later, until it serves again; or has it rebuilt."""
        failed = 0
        while failed < probes and not slot.stale and await self._is_alive(slot):
            await self._deadline.pause(self._delay(failed))
            if await self._passes_probe(slot) and not slot.stale:
                self._restore(slot, "serves again")
                return
            failed += 1
        await self._replace(slot)

    async def load(self, weights: TeacherWeights) -> None:
        """New weights for all replicas. One that does not take them is rebuilt, and takes them."""
        self.weights = weights
        await asyncio.gather(*(self._load(slot, weights) for slot in self._slots))

    async def _load(self, slot: ReplicaSlot, weights: TeacherWeights) -> None:
        replica = slot.replica
        slot.stale = True
        if slot.recovering:
            return
        try:
            await self._take(replica, weights)
        except Exception as error:
            self._failed(slot, replica, error)
        else:
            slot.stale = slot.recovering

    async def _take(self, replica: ScoringReplica, weights: TeacherWeights) -> None:
        assert isinstance(replica, Reloadable)
        work = replica.load(weights.directory)  # after what is in the engine
        before = max(self.balancer.outstanding_tokens, default=0) / self._health.min_tokens_per_s
        await self._deadline.within(weights.timeout_s + before, "loading weights", work)

    async def _rebuilt(self, slot: ReplicaSlot, rebuild: RebuildTeacher) -> None:
        """Another replica in its place, with the newest weights."""
        replica = slot.replica = await rebuild(self._teacher, slot.index, slot.replica)
        taken = None
        while taken is not self.weights:
            taken = self.weights
            assert taken is not None
            await self._take(replica, taken)

    async def _replace(self, slot: ReplicaSlot) -> None:
        while self._rebuild is not None and slot.rebuilds < self._max_rebuilds:
            await self._deadline.pause(self._delay(slot.rebuilds))
            slot.rebuilds += 1
            self._note(slot, "is being rebuilt")
            try:
                await self._rebuilt(slot, self._rebuild)
            except Exception as error:
                self._last_failure = one_line(error)
                self._note(slot, f"could not be rebuilt: {self._last_failure}")
                continue
            self.rebuilds += 1
            slot.stale = False
            self._restore(slot, "is rebuilt")
            return
        self._remove(slot)

    def _remove(self, slot: ReplicaSlot) -> None:
        self._note(slot, "is gone for good")
        slot.gone = True
        self.balancer.remove(slot)
        self._note_recovered()

    def _restore(self, slot: ReplicaSlot, words: str) -> None:
        slot.recovering = False
        self._note_recovered()
        self.balancer.restore(slot)
        self._note(slot, words)

    def _note_recovered(self) -> None:
        if not any(slot.recovering and not slot.gone for slot in self._slots):
            self._all_recovered.set()

    # ── turns ──────────────────────────────────────────────────────────────────────────────────

    async def wake(self) -> None:
        """The replicas have their GPUs; one that does not wake is mended, as any that fails."""
        self.asleep = False
        await self._each("waking up", lambda replica: replica.wake())

    async def sleep(self) -> None:
        """Waits for what is being mended, then all replicas leave their GPUs."""
        failed = True
        while failed:
            await self._all_recovered.wait()
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

        async def one(slot: ReplicaSlot) -> bool:
            replica = slot.replica
            assert isinstance(replica, Sleepable)
            try:
                await self._deadline.within(self._health.timeout_s, what, work(replica))
            except Exception as error:
                self._failed(slot, replica, error)
                return True
            return False

        return any(
            await asyncio.gather(*(one(slot) for slot in self._slots if not slot.recovering))
        )

    async def _is_alive(self, slot: ReplicaSlot) -> bool:
        return await self._succeeds(self._health.timeout_s, "a sign of life", slot.replica.ready())

    async def _passes_probe(self, slot: ReplicaSlot) -> bool:
        if self.probe_batch is None:
            return True
        work = score_checked(self._name, self.probe_batch, slot.replica)
        return await self._succeeds(self._bound(tokens_of(self.probe_batch)), "a probe", work)

    async def _succeeds(self, bound: float, what: str, work: Coroutine[Any, Any, Any]) -> bool:
        try:
            await self._deadline.within(bound, what, work)
        except Exception as error:
            self._last_failure = one_line(error)
            return False
        return True

    def _delay(self, before: int) -> float:
        """0, 1, 3, 7 … times ``probe_s``: at once, then later and later."""
        return float(self._health.probe_s * (2 ** min(before, 16) - 1))

    def _note(self, slot: ReplicaSlot, words: str) -> None:
        self._notify(f"{self._name}/{slot.index} {words}")

    def all_gone(self) -> NoReplica:
        """The error of work that nobody is left for."""
        return NoReplica(
            self._name,
            f"all {len(self._slots)} replicas are gone; the last failure: {self._last_failure}",
            "see run.log for what became of each, and Ray's session directory for their logs",
        )

    async def reports(self) -> list[StageReport]:
        """Of those that serve, and answer in time."""
        parts = await asyncio.gather(*(self._part(s) for s in self._slots if not s.recovering))
        return [part for part in parts if part is not None]

    async def _part(self, slot: ReplicaSlot) -> StageReport | None:
        replica = slot.replica
        try:
            return await self._deadline.within(REPORT_S, "a report", replica.report())
        except StageTimeout:
            return None
        except Exception as error:
            if not self.asleep:  # else it is found out, and mended, when it is its turn
                self._failed(slot, replica, error)
            return None


async def score_checked(name: str, batch: Batch, replica: ScoringReplica) -> Batch:
    """Its samples, checked."""
    samples = await replica.score(batch)
    await offload(samples.nbytes, check, name, batch, samples)
    return samples


def tokens_of(batch: Batch) -> int:
    """Prompts and responses."""
    return sum(header.tokens for header in batch.headers)


def one_line(error: Exception) -> str:
    """An error in one line."""
    kind = "" if isinstance(error, StageError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:500]
