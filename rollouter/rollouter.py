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

from async_opd.core.alarm import Alarm, Timer
from async_opd.core.config import SupervisionConfig
from async_opd.core.errors import RolloutFault, StageError, StageTimeout
from async_opd.core.patience import ANSWER_S, Progress, Several
from async_opd.core.payload import calls
from async_opd.core.reports import merge_reports
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import PROMPTS, Queue, SamplingSpec, StageReport
from async_opd.core.supervision import Restarts

REPORT_S = 10.0
"""A replica that does not report in time is left out of this report."""


class Replica(Protocol):
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


class Rebuild(Protocol):
    """Replaces replicas; given by who can start processes."""

    async def __call__(self, name: str, old: Any) -> Replica:
        """Ends the old one for good; another one that has joined with the newest weights.

        Raises when that fails.
        """
        ...


@dataclass(eq=False)
class _Seat:
    """A replica's place in the pool, whoever sits on it. ``failure`` has ended its life.

    ``served`` counts reports, one for each step, in which it had finished rollouts.
    """

    name: str
    replica: Replica
    restarts: Restarts
    served: int = 0
    failure: Exception | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RollouterStage:
    """Implements ``async_opd.core.stages.Rollouter`` over named replicas of one student.

    ``lost(name, error)`` is told of every replica that leaves the pool, ``tell`` what people should
    know.
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        queue: Queue,
        rebuild: Rebuild | None = None,
        supervision: SupervisionConfig | None = None,
        *,
        lost: Callable[[str, Exception], None] = lambda name, error: None,
        tell: Callable[[str], None] = lambda text: None,
        timer: Timer | None = None,
        answer_s: float = ANSWER_S / 2,
    ) -> None:
        """Without ``rebuild`` a replica that leaves the pool is gone.

        ``answer_s`` bounds the answer of each replica to ``progress``; see patience.answer_s.
        """
        self._supervision = supervision or SupervisionConfig()
        self._seats = {
            name: _Seat(name, replica, Restarts(self._supervision))
            for name, replica in replicas.items()
        }
        self._queue = queue
        self._rebuild = rebuild
        self._lost = lost
        self._tell = tell
        self._alarm = Alarm("rollout", timer)
        self._joined = asyncio.Event()
        self._rebuilds = 0
        self._several = Several({}, answer_s, timer)

    async def run(self) -> None:
        """Until cancelled, or until the last replica is gone: then its error."""
        async with asyncio.TaskGroup() as group:
            for seat in list(self._seats.values()):
                group.create_task(self._keep(seat), name=seat.name)

    def lose(self, name: str, error: Exception) -> None:
        """A replica's life ends here, whoever noticed; ``run`` does the rest."""
        seat = self._seats.get(name)
        if seat is not None and seat.failure is None:
            seat.failure = error
            seat.over.set()
            self._tell(f"{name} left the pool: {_words(error)}")
            self._lost(name, error)

    @property
    def replicas(self) -> dict[str, Replica]:
        """Those that serve, by name."""
        return {seat.name: seat.replica for seat in self._serving()}

    async def halt(self) -> None:
        """After ``run`` was cancelled: the replicas stop too. ``run`` can begin again."""
        await asyncio.gather(*(self._stop(seat) for seat in self._serving()))

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Evaluation: the prompts spread evenly over the replicas, results in order.

        What a replica did not answer before it died is answered by the others, or by the next one.
        """
        left = list(prompts)
        by_uid: dict[str, Rollout] = {}
        while left:
            seats = await self._some_serving()
            parts = [part for at in range(len(seats)) if (part := left[at :: len(seats)])]
            answers = await asyncio.gather(
                *(
                    self._answers(seat, call, sampling)
                    for seat, part in zip(seats, parts, strict=False)
                    for call in calls(part, sampling)
                )
            )
            by_uid |= {rollout.uid: rollout for answer in answers for rollout in answer}
            left = [prompt for prompt in left if f"{prompt.uid}/0" not in by_uid]
        return [by_uid[f"{p.uid}/{index}"] for p in prompts for index in range(sampling.n)]

    async def progress(self) -> Progress:
        """The tokens of all replicas; see ``Several``."""
        self._several.asks = {seat.name: seat.replica.progress for seat in self._serving()}
        return await self._several()

    async def report(self) -> StageReport:
        """All serving replicas' reports as one; ``rebuilds`` is a total since the start."""
        seats = self._serving()
        found = await asyncio.gather(*(self._part(seat) for seat in seats))
        merged = merge_reports(report for report in found if report is not None)
        return replace(
            merged,
            gauges={
                **merged.gauges,
                "replicas": float(len(seats)),
                "rebuilds": float(self._rebuilds),
            },
            waits_for=merged.waits_for if seats else "a replica that is being rebuilt",
        )

    # ── one replica ────────────────────────────────────────────────────────────────────────────

    async def _keep(self, seat: _Seat) -> None:
        """Life after life; raises the last one's error if there is no other replica left."""
        while True:
            error = await self._live(seat)
            await self._queue.release(PROMPTS, seat.replica.consumer)
            if not await self._mend(seat):
                break
        del self._seats[seat.name]
        self._tell(f"{seat.name} is gone for good")
        if not self._seats:
            raise error

    async def _live(self, seat: _Seat) -> Exception:
        """One life of the replica: how it ended."""
        work = asyncio.create_task(self._work(seat), name=f"{seat.name}: work")
        pulse = asyncio.create_task(self._pulse(seat), name=f"{seat.name}: pulse")
        try:
            await seat.over.wait()
        finally:
            work.cancel()
            pulse.cancel()
        assert seat.failure is not None
        return seat.failure

    async def _work(self, seat: _Seat) -> None:
        """Runs the replica, until it fails."""
        try:
            await seat.replica.run()
            raise StageError(seat.name, "its loop ended while the run was going on")
        except Exception as error:
            self.lose(seat.name, error)

    async def _pulse(self, seat: _Seat) -> None:
        """Asks for signs of life, until one does not come."""
        bounds = self._supervision
        try:
            while True:
                await self._alarm.pause(bounds.heartbeat_s)
                await self._alarm.within(bounds.timeout_s, "a sign of life", seat.replica.alive())
        except Exception as error:
            self.lose(seat.name, error)

    async def _mend(self, seat: _Seat) -> bool:
        """Rebuilds the replica, later each time; false if it was tried too often."""
        while self._rebuild is not None:
            delay = seat.restarts.next_delay(seat.served)
            if delay is None:
                return False
            await self._alarm.pause(delay)
            try:
                seat.replica = await self._rebuild(seat.name, seat.replica)
            except Exception as error:
                self._tell(f"{seat.name} could not be rebuilt: {_words(error)}")
                continue
            self._back(seat)
            return True
        return False

    def _back(self, seat: _Seat) -> None:
        seat.failure = None
        seat.over.clear()
        self._rebuilds += 1
        self._tell(f"{seat.name} is rebuilt")
        self._joined.set()

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    def _serving(self) -> list[_Seat]:
        return [seat for seat in self._seats.values() if seat.failure is None]

    async def _some_serving(self) -> list[_Seat]:
        while not (seats := self._serving()):
            self._joined.clear()
            await self._joined.wait()
        return seats

    async def _answers(
        self, seat: _Seat, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """Those of one replica; none if its life ends before.

        A rollout's fault is nobody's death: it would follow its prompt from replica to replica.
        """
        work = asyncio.create_task(seat.replica.generate(prompts, sampling))
        try:
            await _until(seat, work)
            return work.result() if work.done() else []
        except RolloutFault:
            raise
        except Exception as error:
            self.lose(seat.name, error)
            return []
        finally:
            work.cancel()

    async def _stop(self, seat: _Seat) -> None:
        try:
            await self._alarm.within(self._supervision.timeout_s, "stopping", seat.replica.stop())
        except Exception as error:
            self.lose(seat.name, error)

    async def _part(self, seat: _Seat) -> StageReport | None:
        try:
            report = await self._alarm.within(REPORT_S, "a report", seat.replica.report())
        except StageTimeout:
            return None
        except Exception as error:
            self.lose(seat.name, error)
            return None
        seat.served += report.counters.get("tokens", 0) > 0
        return report


async def _until(seat: _Seat, work: asyncio.Task[Any]) -> None:
    """Waits for the work, and no longer than the replica's life lasts."""
    over = asyncio.create_task(seat.over.wait())
    try:
        await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()


def _words(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:500]
