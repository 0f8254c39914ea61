"""The rollout stage: the student's replicas as one pool.

    topic prompts ──► replica.run, each pulls what it has room for ──► topic rollouts/<teacher>

    serving ── its run ends, a call fails, no sign of life, its sync fails ──► out of the pool
       ▲                                                                          │ later and later
       └── has joined with the newest weights ◄── rebuilt ◄───────────────────────┘ too often: gone

There is no dispatcher: a replica takes the next groups when it has free slots, so that work goes
where there is room. What a replica that dies had taken goes to the others at once, and waits in the
topic if there are none. Only when all are gone for good does the last one's error end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from async_opd.config.run_config import SupervisionConfig
from async_opd.core.deadline import Deadline, Timer
from async_opd.core.errors import RolloutFault, StageError, StageTimeout
from async_opd.core.liveness import ANSWER_S, CombinedProgress, Progress
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import PROMPTS, Queue, SamplingSpec, StageReport
from async_opd.core.uid import Uid, rollout_uid
from async_opd.observability.pool_report import merge_reports
from async_opd.processes.restarts import Restarts
from async_opd.queue.sizes import calls

REPORT_S = 10.0
"""A replica that does not report in time is left out of this report."""


class RolloutReplica(Protocol):
    """What the stage needs of a student replica."""

    @property
    def consumer(self) -> str:
        """What the queue knows it by."""
        ...

    async def run(self) -> None: ...

    async def stop(self) -> None:
        """Ends ``run``, and nothing that it still had reaches the queue."""

    async def alive(self) -> None:
        """Returns if it works, raises or hangs if not."""

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def progress(self) -> Progress: ...

    async def report(self) -> StageReport: ...


class RebuildStudent(Protocol):
    """Replaces replicas; given by who can start processes."""

    async def __call__(self, name: str, old: Any) -> RolloutReplica:
        """Ends the old one for good; another one that has joined with the newest weights.

        Raises when that fails.
        """
        ...


@dataclass(eq=False)
class _ReplicaSlot:
    """A replica's place in the pool, whoever sits on it. ``failure`` has ended its life.

    ``served`` counts reports, one for each step, in which it had finished rollouts.
    """

    name: str
    replica: RolloutReplica
    restarts: Restarts
    served: int = 0
    failure: Exception | None = None
    ejected: asyncio.Event = field(default_factory=asyncio.Event)


class RollouterStage:
    """Implements ``async_opd.core.stages.Rollouter`` over named replicas of one student.

    ``lost(name, error)`` is told of every replica that leaves the pool, ``notify`` what people
    should know.
    """

    def __init__(
        self,
        replicas: Mapping[str, RolloutReplica],
        queue: Queue,
        rebuild: RebuildStudent | None = None,
        supervision: SupervisionConfig | None = None,
        *,
        lost: Callable[[str, Exception], None] = lambda name, error: None,
        notify: Callable[[str], None] = lambda text: None,
        timer: Timer | None = None,
        answer_s: float = ANSWER_S / 2,
    ) -> None:
        """Without ``rebuild`` a replica that leaves the pool is gone.

        ``answer_s`` bounds the answer of each replica to ``progress``; see patience.answer_s.
        """
        self._supervision = supervision or SupervisionConfig()
        self._slots = {
            name: _ReplicaSlot(name, replica, Restarts(self._supervision))
            for name, replica in replicas.items()
        }
        self._queue = queue
        self._rebuild = rebuild
        self._lost = lost
        self._notify = notify
        self._deadline = Deadline("rollout", timer)
        self._joined = asyncio.Event()
        self._rebuilds = 0
        self._progress = CombinedProgress({}, answer_s, timer)

    async def run(self) -> None:
        """Until cancelled, or until the last replica is gone: then its error."""
        async with asyncio.TaskGroup() as group:
            for slot in list(self._slots.values()):
                group.create_task(self._supervise(slot), name=slot.name)

    def eject(self, name: str, error: Exception) -> None:
        """A replica's life ends here, whoever noticed; ``run`` does the rest."""
        slot = self._slots.get(name)
        if slot is not None and slot.failure is None:
            slot.failure = error
            slot.ejected.set()
            self._notify(f"{name} left the pool: {_one_line(error)}")
            self._lost(name, error)

    @property
    def replicas(self) -> dict[str, RolloutReplica]:
        """Those that serve, by name."""
        return {slot.name: slot.replica for slot in self._serving()}

    async def halt(self) -> None:
        """After ``run`` was cancelled: the replicas stop too. ``run`` can begin again."""
        await asyncio.gather(*(self._stop(slot) for slot in self._serving()))

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Evaluation: the prompts spread evenly over the replicas, results in order.

        What a replica did not answer before it died is answered by the others, or by the next one.
        """
        left = list(prompts)
        by_uid: dict[Uid, Rollout] = {}
        while left:
            slots = await self._wait_for_serving()
            parts = [part for at in range(len(slots)) if (part := left[at :: len(slots)])]
            answers = await asyncio.gather(
                *(
                    self._answers(slot, call, sampling)
                    for slot, part in zip(slots, parts, strict=False)
                    for call in calls(part, sampling)
                )
            )
            by_uid |= {rollout.uid: rollout for answer in answers for rollout in answer}
            left = [prompt for prompt in left if rollout_uid(prompt.uid, 0) not in by_uid]
        return [by_uid[rollout_uid(p.uid, index)] for p in prompts for index in range(sampling.n)]

    async def progress(self) -> Progress:
        """The tokens of all replicas; see ``CombinedProgress``."""
        self._progress.asks = {slot.name: slot.replica.progress for slot in self._serving()}
        return await self._progress()

    async def report(self) -> StageReport:
        """All serving replicas' reports as one; ``rebuilds`` is a total since the start."""
        slots = self._serving()
        found = await asyncio.gather(*(self._part(slot) for slot in slots))
        merged = merge_reports(report for report in found if report is not None)
        return replace(
            merged,
            gauges={
                **merged.gauges,
                "replicas": float(len(slots)),
                "rebuilds": float(self._rebuilds),
            },
            waits_for=merged.waits_for if slots else "a replica that is being rebuilt",
        )

    # ── one replica ────────────────────────────────────────────────────────────────────────────

    async def _supervise(self, slot: _ReplicaSlot) -> None:
        """Life after life; raises the last one's error if there is no other replica left."""
        while True:
            error = await self._serve_until_failure(slot)
            await self._queue.release(PROMPTS, slot.replica.consumer)
            if not await self._rebuild_with_backoff(slot):
                break
        del self._slots[slot.name]
        self._notify(f"{slot.name} is gone for good")
        if not self._slots:
            raise error

    async def _serve_until_failure(self, slot: _ReplicaSlot) -> Exception:
        """One life of the replica: how it ended."""
        work = asyncio.create_task(self._work(slot), name=f"{slot.name}: work")
        pulse = asyncio.create_task(self._heartbeat(slot), name=f"{slot.name}: pulse")
        try:
            await slot.ejected.wait()
        finally:
            work.cancel()
            pulse.cancel()
        assert slot.failure is not None
        return slot.failure

    async def _work(self, slot: _ReplicaSlot) -> None:
        """Runs the replica, until it fails."""
        try:
            await slot.replica.run()
            raise StageError(slot.name, "its loop ended while the run was going on")
        except Exception as error:
            self.eject(slot.name, error)

    async def _heartbeat(self, slot: _ReplicaSlot) -> None:
        """Asks for signs of life, until one does not come."""
        bounds = self._supervision
        try:
            while True:
                await self._deadline.pause(bounds.heartbeat_s)
                await self._deadline.within(
                    bounds.timeout_s, "a sign of life", slot.replica.alive()
                )
        except Exception as error:
            self.eject(slot.name, error)

    async def _rebuild_with_backoff(self, slot: _ReplicaSlot) -> bool:
        """Rebuilds the replica, later each time; false if it was tried too often."""
        while self._rebuild is not None:
            delay = slot.restarts.next_delay(slot.served)
            if delay is None:
                return False
            await self._deadline.pause(delay)
            try:
                slot.replica = await self._rebuild(slot.name, slot.replica)
            except Exception as error:
                self._notify(f"{slot.name} could not be rebuilt: {_one_line(error)}")
                continue
            self._rejoin(slot)
            return True
        return False

    def _rejoin(self, slot: _ReplicaSlot) -> None:
        slot.failure = None
        slot.ejected.clear()
        self._rebuilds += 1
        self._notify(f"{slot.name} is rebuilt")
        self._joined.set()

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    def _serving(self) -> list[_ReplicaSlot]:
        return [slot for slot in self._slots.values() if slot.failure is None]

    async def _wait_for_serving(self) -> list[_ReplicaSlot]:
        while not (slots := self._serving()):
            self._joined.clear()
            await self._joined.wait()
        return slots

    async def _answers(
        self, slot: _ReplicaSlot, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """Those of one replica; none if its life ends before.

        A rollout's fault is nobody's death: it would follow its prompt from replica to replica.
        """
        work = asyncio.create_task(slot.replica.generate(prompts, sampling))
        try:
            await _until(slot, work)
            return work.result() if work.done() else []
        except RolloutFault:
            raise
        except Exception as error:
            self.eject(slot.name, error)
            return []
        finally:
            work.cancel()

    async def _stop(self, slot: _ReplicaSlot) -> None:
        try:
            await self._deadline.within(
                self._supervision.timeout_s, "stopping", slot.replica.stop()
            )
        except Exception as error:
            self.eject(slot.name, error)

    async def _part(self, slot: _ReplicaSlot) -> StageReport | None:
        try:
            report = await self._deadline.within(REPORT_S, "a report", slot.replica.report())
        except StageTimeout:
            return None
        except Exception as error:
            self.eject(slot.name, error)
            return None
        slot.served += report.counters.get("tokens", 0) > 0
        return report


async def _until(slot: _ReplicaSlot, work: asyncio.Task[Any]) -> None:
    """Waits for the work, and no longer than the replica's life lasts."""
    ejected = asyncio.create_task(slot.ejected.wait())
    try:
        await asyncio.wait({work, ejected}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ejected.cancel()


def _one_line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:500]
