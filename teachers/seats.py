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

from async_opd.core.alarm import Alarm, Timer
from async_opd.core.aside import aside
from async_opd.core.balancer import Balancer, Place
from async_opd.core.batch import Batch
from async_opd.core.config import EndpointHealth, HealthConfig
from async_opd.core.errors import NoReplica, StageError, StageTimeout
from async_opd.core.stages import StageReport
from teachers.checks import check
from teachers.replicas import Rebuild, Reloadable, Replica, Sleeper, Weights

Result = TypeVar("Result")

Health = HealthConfig | EndpointHealth

LONGEST_DELAY_S = 30.0
"""Between two probes of a server that may be away for long."""
IN_FLIGHT = 2
"""Batches in flight per replica: one in the engine, one behind it."""
REPORT_S = 10.0
"""A replica that does not report in time is left out of this report."""


@dataclass(eq=False)
class Seat:
    """A replica's place in the pool, whoever sits on it.

    ``rebuilds`` counts since it last succeeded at work. ``stale``: it did not take the newest
    weights, and must be rebuilt.
    """

    index: int
    replica: Replica
    mending: bool = False
    gone: bool = False
    stale: bool = False
    rebuilds: int = 0


class Seats:
    """Of one teacher. ``run`` mends replicas and never ends by itself.

    ``example`` is one rollout that could be scored, for probes.
    """

    def __init__(
        self,
        teacher: str,
        replicas: Sequence[Replica],
        health: Health,
        rebuild: Rebuild | None,
        *,
        tell: Callable[[str], None],
        asleep: bool,
        timer: Timer | None,
        clock: Callable[[], float],
    ) -> None:
        """``asleep``: the replicas are, and work only between ``wake`` and ``sleep``.

        ``tell`` hears what became of whom.
        """
        self.example: Batch | None = None
        self._tell = tell
        self.failures = self.rebuilds = 0.0
        self.tokens = 0  # of calls that succeeded
        self.weights: Weights | None = None
        self.asleep = asleep
        self._teacher = teacher
        self._name = f"teacher {teacher}"
        self._health = health
        self._most_rebuilds = health.rebuilds if isinstance(health, HealthConfig) and rebuild else 0
        self._rebuild = rebuild
        self._alarm = Alarm(self._name, timer)
        self._clock = clock
        self._seats = [Seat(index, replica) for index, replica in enumerate(replicas)]
        self.balancer = Balancer(self._seats, IN_FLIGHT, name=self._name)
        self._suspects: asyncio.Queue[Seat] = asyncio.Queue()
        self._last_failure = ""
        self._whole = asyncio.Event()  # nothing is being mended
        self._whole.set()

    @property
    def replicas(self) -> list[Replica]:
        """All of them, also those that do not serve."""
        return [seat.replica for seat in self._seats]

    async def run(self) -> None:
        """Mends replicas as they fail."""
        async with asyncio.TaskGroup() as group:
            while True:
                seat = await self._suspects.get()
                group.create_task(self._mend(seat), name=f"mend {self._name}/{seat.index}")

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def call(
        self,
        place: Place[Seat],
        what: str,
        work: Callable[[Replica], Coroutine[Any, Any, Result]],
        least_s: float = 0.0,
    ) -> Result:
        """Within its bound, or ``least_s``; gives the place back. What fails is the replica's."""
        seat, replica = place.replica, place.replica.replica
        try:
            bound = max(least_s, self._bound(place.outstanding))
            result = await self._alarm.within(bound, f"{what} on /{seat.index}", work(replica))
            self.tokens += place.tokens
            return result
        except Exception as error:
            self._failed(seat, replica, error)
            raise
        finally:
            self.balancer.release(place)

    def _bound(self, tokens: int) -> float:
        """Seconds that a call may take on a replica with so many tokens outstanding."""
        return self._health.timeout_s + tokens / self._health.min_tokens_per_s

    # ── health ─────────────────────────────────────────────────────────────────────────────────

    def _failed(self, seat: Seat, replica: Replica, error: Exception) -> None:
        """Takes the replica out, until it has proved itself."""
        self.failures += 1
        self._last_failure = in_words(error)
        if seat.mending or seat.replica is not replica:
            return  # known already, or a late answer of one that has been replaced
        seat.mending = True
        self._whole.clear()
        self.balancer.eject(seat)
        self._note(seat, f"ejected: {self._last_failure}")
        self._suspects.put_nowait(seat)

    async def _mend(self, seat: Seat) -> None:
        """Until the replica serves again, itself or another in its place, or is given up."""
        if isinstance(self._health, EndpointHealth):
            await self._await_back(seat, self._health.patience_s)
        else:
            await self._revive(seat, self._health.probes)

    async def _await_back(self, seat: Seat, patience_s: float) -> None:
        """Probes a server that nobody here can rebuild, each time later."""
        failed, deadline = 0, self._clock() + patience_s
        while self._clock() < deadline:
            await self._alarm.pause(min(self._delay(failed), LONGEST_DELAY_S))
            if await self._lives(seat) and await self._proves_itself(seat):
                self._serves_again(seat, "serves again")
                return
            failed += 1
        self._give_up(seat)

    async def _revive(self, seat: Seat, probes: int) -> None:
        """Probes the replica, each time later, until it serves again; or has it rebuilt."""
        failed = 0
        while failed < probes and not seat.stale and await self._lives(seat):
            await self._alarm.pause(self._delay(failed))
            if await self._proves_itself(seat) and not seat.stale:
                self._serves_again(seat, "serves again")
                return
            failed += 1
        await self._replace(seat)

    async def load(self, weights: Weights) -> None:
        """New weights for all replicas. One that does not take them is rebuilt, and takes them."""
        self.weights = weights
        await asyncio.gather(*(self._load(seat, weights) for seat in self._seats))

    async def _load(self, seat: Seat, weights: Weights) -> None:
        replica = seat.replica
        seat.stale = True
        if seat.mending:
            return
        try:
            await self._take(replica, weights)
        except Exception as error:
            self._failed(seat, replica, error)
        else:
            seat.stale = seat.mending

    async def _take(self, replica: Replica, weights: Weights) -> None:
        assert isinstance(replica, Reloadable)
        work = replica.load(weights.directory)  # after what is in the engine
        before = max(self.balancer.outstanding_tokens, default=0) / self._health.min_tokens_per_s
        await self._alarm.within(weights.timeout_s + before, "loading weights", work)

    async def _rebuilt(self, seat: Seat, rebuild: Rebuild) -> None:
        """Another replica in its place, with the newest weights."""
        replica = seat.replica = await rebuild(self._teacher, seat.index, seat.replica)
        taken = None
        while taken is not self.weights:
            taken = self.weights
            assert taken is not None
            await self._take(replica, taken)

    async def _replace(self, seat: Seat) -> None:
        while self._rebuild is not None and seat.rebuilds < self._most_rebuilds:
            await self._alarm.pause(self._delay(seat.rebuilds))
            seat.rebuilds += 1
            self._note(seat, "is being rebuilt")
            try:
                await self._rebuilt(seat, self._rebuild)
            except Exception as error:
                self._last_failure = in_words(error)
                self._note(seat, f"could not be rebuilt: {self._last_failure}")
                continue
            self.rebuilds += 1
            seat.stale = False
            self._serves_again(seat, "is rebuilt")
            return
        self._give_up(seat)

    def _give_up(self, seat: Seat) -> None:
        self._note(seat, "is gone for good")
        seat.gone = True
        self.balancer.remove(seat)
        self._settled()

    def _serves_again(self, seat: Seat, words: str) -> None:
        seat.mending = False
        self._settled()
        self.balancer.restore(seat)
        self._note(seat, words)

    def _settled(self) -> None:
        if not any(seat.mending and not seat.gone for seat in self._seats):
            self._whole.set()

    # ── turns ──────────────────────────────────────────────────────────────────────────────────

    async def wake(self) -> None:
        """The replicas have their GPUs; one that does not wake is mended, as any that fails."""
        self.asleep = False
        await self._each("waking up", lambda replica: replica.wake())

    async def sleep(self) -> None:
        """Waits for what is being mended, then all replicas leave their GPUs."""
        failed = True
        while failed:
            await self._whole.wait()
            failed = await self._each("going to sleep", lambda replica: replica.sleep())
        self.asleep = True

    async def rest(self) -> None:
        """All that serve leave their GPUs, whichever stage woke them; a mend is not waited for."""
        await self._each("going to sleep", lambda replica: replica.sleep())
        self.asleep = True

    async def _each(self, what: str, work: Callable[[Sleeper], Coroutine[Any, Any, None]]) -> bool:
        """Does it with every replica that serves. Whether one failed."""

        async def one(seat: Seat) -> bool:
            replica = seat.replica
            assert isinstance(replica, Sleeper)
            try:
                await self._alarm.within(self._health.timeout_s, what, work(replica))
            except Exception as error:
                self._failed(seat, replica, error)
                return True
            return False

        return any(await asyncio.gather(*(one(seat) for seat in self._seats if not seat.mending)))

    async def _lives(self, seat: Seat) -> bool:
        return await self._succeeds(self._health.timeout_s, "a sign of life", seat.replica.ready())

    async def _proves_itself(self, seat: Seat) -> bool:
        if self.example is None:
            return True
        work = scored(self._name, self.example, seat.replica)
        return await self._succeeds(self._bound(tokens_of(self.example)), "a probe", work)

    async def _succeeds(self, bound: float, what: str, work: Coroutine[Any, Any, Any]) -> bool:
        try:
            await self._alarm.within(bound, what, work)
        except Exception as error:
            self._last_failure = in_words(error)
            return False
        return True

    def _delay(self, before: int) -> float:
        """0, 1, 3, 7 … times ``probe_s``: at once, then later and later."""
        return float(self._health.probe_s * (2 ** min(before, 16) - 1))

    def _note(self, seat: Seat, words: str) -> None:
        self._tell(f"{self._name}/{seat.index} {words}")

    def all_gone(self) -> NoReplica:
        """The error of work that nobody is left for."""
        return NoReplica(
            self._name,
            f"all {len(self._seats)} replicas are gone; the last failure: {self._last_failure}",
            "see run.log for what became of each, and Ray's session directory for their logs",
        )

    async def reports(self) -> list[StageReport]:
        """Of those that serve, and answer in time."""
        parts = await asyncio.gather(*(self._part(s) for s in self._seats if not s.mending))
        return [part for part in parts if part is not None]

    async def _part(self, seat: Seat) -> StageReport | None:
        replica = seat.replica
        try:
            return await self._alarm.within(REPORT_S, "a report", replica.report())
        except StageTimeout:
            return None
        except Exception as error:
            if not self.asleep:  # else it is found out, and mended, when it is its turn
                self._failed(seat, replica, error)
            return None


async def scored(name: str, batch: Batch, replica: Replica) -> Batch:
    """Its samples, checked."""
    samples = await replica.score(batch)
    await aside(samples.nbytes, check, name, batch, samples)
    return samples


def tokens_of(batch: Batch) -> int:
    """Prompts and responses."""
    return sum(header.tokens for header in batch.headers)


def in_words(error: Exception) -> str:
    """An error in one line."""
    kind = "" if isinstance(error, StageError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:500]
