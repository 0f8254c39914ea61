"""A teacher's replicas as one: balanced, watched, mended.

    batch ──balancer──► replica.score ──► checked samples
                             │ fails: another replica; in the end each rollout alone
                             ▼
        serving ──fails──► ejected ──is dead, or fails its probes──► rebuilt ──fails──► gone
           ▲                  │ a probe succeeds                        │
           └──────────────────┴─────────────────────────────────────────┘

A replica that has failed once gets no work until it has proved itself: one that fails fast would
attract everything. Without any replica left, work fails with a name instead of waiting.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from async_opd.core.alarm import Alarm, Timer
from async_opd.core.balancer import Balancer, Place
from async_opd.core.batch import Batch, unpack_pieces
from async_opd.core.config import EndpointHealth, HealthConfig
from async_opd.core.errors import NoReplica, StageError, StageTimeout
from async_opd.core.reports import merge_reports
from async_opd.core.samples import Lost, Piece, Prompt, Rollout
from async_opd.core.stages import SamplingSpec, StageReport
from teachers.checks import check
from teachers.homes import Homes

Result = TypeVar("Result")

Health = HealthConfig | EndpointHealth

LONGEST_DELAY_S = 30.0
"""Between two probes of a server that may be away for long."""
IN_FLIGHT = 2
"""Batches in flight per replica: one in the engine, one behind it."""
EARLY = ("early_rows", "early_used", "early_dropped")
"""Totals: rows scored ahead, those of them in finished samples, and pieces that were given up."""
REPORT_S = 10.0
"""A replica that does not report in time is left out of this report."""


class Replica(Protocol):
    """What the pool needs of a teacher replica."""

    async def score(self, batch: Batch) -> Batch: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def report(self) -> StageReport: ...

    async def ready(self) -> int: ...


@runtime_checkable
class Reloadable(Replica, Protocol):
    """A replica whose weights can change."""

    async def load(self, directory: str) -> None: ...


@runtime_checkable
class Ahead(Replica, Protocol):
    """A replica that scores rollouts while they grow."""

    async def early(self, batch: Batch) -> int: ...


@runtime_checkable
class Sleeper(Replica, Protocol):
    """A replica that can leave its GPUs to others for a while."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


@dataclass(frozen=True)
class Weights:
    """A version of the student's weights in a directory, and how long taking them may take."""

    version: int
    directory: str
    timeout_s: float


class Rebuild(Protocol):
    """Replaces replicas; given by who can start processes."""

    async def __call__(self, teacher: str, index: int, old: Any) -> Replica:
        """Ends the old replica for good and starts another. Raises when that fails."""
        ...

    async def close(self) -> None:
        """Ends every replica that was started here."""


@dataclass(frozen=True)
class Scored:
    """What became of a batch: samples, and rollouts that no replica could score."""

    samples: tuple[Batch, ...] = ()
    lost: tuple[Lost, ...] = ()


@dataclass(eq=False)
class _Seat:
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


class TeacherPool:
    """Scores batches on whichever replica can. ``run`` mends replicas and never ends by itself."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        health: Health,
        rebuild: Rebuild | None = None,
        *,
        asleep: bool = False,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``asleep``: the replicas are, and work only between ``wake`` and ``sleep``."""
        self._teacher = name
        self._name = f"teacher {name}"
        self._health = health
        self._rebuilds = health.rebuilds if isinstance(health, HealthConfig) and rebuild else 0
        self._rebuild = rebuild
        self._alarm = Alarm(self._name, timer)
        self._clock = clock
        self._seats = [_Seat(index, replica) for index, replica in enumerate(replicas)]
        self.balancer = Balancer(self._seats, IN_FLIGHT, name=self._name)
        self._suspects: asyncio.Queue[_Seat] = asyncio.Queue()
        self._totals = dict.fromkeys(("failures", "retries", "rebuilds", "dead_letters"), 0.0)
        self._seconds: deque[float] = deque(maxlen=1024)
        self._notes: list[str] = []
        self._homes: Homes[Replica] = Homes()
        self._early: Counter[str] = Counter()
        self._example: Batch | None = None  # one rollout that could be scored, for probes
        self._last_failure = ""
        self._weights: Weights | None = None
        self._asleep = asleep
        self._whole = asyncio.Event()  # nothing is being mended
        self._whole.set()

    async def run(self) -> None:
        """Mends replicas as they fail."""
        async with asyncio.TaskGroup() as group:
            while True:
                seat = await self._suspects.get()
                group.create_task(self._mend(seat), name=f"mend {self._name}/{seat.index}")

    # ── work ───────────────────────────────────────────────────────────────────────────────────

    async def score(self, batch: Batch) -> Scored:
        """The samples, and the rollouts that no replica could score. Raises NoReplica.

        The first half of ``health.tries`` is made with the whole batch, the second with each of
        its rollouts alone, so that one of them cannot take the others with it. Rollouts of which a
        replica has the beginning are tried there first.
        """
        parts = self._by_home(batch) if len(batch) else []
        return await self._all(parts, self._health.tries)

    async def early(self, batch: Batch) -> None:
        """Has pieces of rollouts under way scored, each where the one before it was.

        What cannot be is dropped and counted: the finished rollout comes in any case.
        """
        serving = self._serving
        parts: defaultdict[Replica | None, list[Piece]] = defaultdict(list)
        for piece in unpack_pieces([batch]):
            parts[self._homes.place(piece, serving)].append(piece)
        self._early["early_dropped"] += len(parts.pop(None, ()))
        async with asyncio.TaskGroup() as group:
            for replica, pieces in parts.items():
                assert isinstance(replica, Ahead)
                group.create_task(self._ahead(serving[replica], replica, Batch.pack(pieces)))

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """What the teacher itself answers, from one replica."""
        tokens = sum(len(p.token_ids) + sampling.n * sampling.max_tokens for p in prompts)
        outcome = await self._tries(
            self._health.tries, "generate", tokens, None, lambda r: r.generate(prompts, sampling)
        )
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @property
    def _serving(self) -> dict[Replica, _Seat]:
        return {seat.replica: seat for seat in self._seats if not seat.mending and not seat.gone}

    async def _ahead(self, seat: _Seat, replica: Ahead, batch: Batch) -> None:
        place = self.balancer.take_on(seat, _tokens(batch))
        used = 0
        if place is not None:
            with suppress(Exception):  # a failed call is the replica's affair, as any
                used = await self._call(place, "pieces", lambda _: replica.early(batch))
        self._early["early_dropped"] += len(batch) - used

    def _by_home(self, batch: Batch) -> list[tuple[_Seat | None, Batch]]:
        if not self._homes.used:
            return [(None, batch)]
        serving = self._serving
        parts: defaultdict[_Seat | None, list[Batch]] = defaultdict(list)
        for one in _singles(batch):
            home = self._homes.finish(one.headers[0].uid)
            parts[serving.get(home) if home is not None else None].append(one)
        return [(seat, Batch.join(ones)) for seat, ones in parts.items()]

    async def _all(self, parts: Iterable[tuple[_Seat | None, Batch]], tries: int) -> Scored:
        found = await asyncio.gather(*(self._score(part, tries, home) for home, part in parts))
        return Scored(
            tuple(samples for part in found for samples in part.samples),
            tuple(lost for part in found for lost in part.lost),
        )

    async def _score(self, batch: Batch, tries: int, home: _Seat | None = None) -> Scored:
        whole = tries if len(batch) == 1 else math.ceil(tries / 2)
        work = partial(self._scored, batch)
        outcome = await self._tries(whole, "score", _tokens(batch), _group(batch), work, home)
        if isinstance(outcome, Batch):
            self._example = batch.split(1)[0]
            return Scored((outcome,))
        if len(batch) == 1:
            self._totals["dead_letters"] += 1
            reason = f"no replica could score it in {self._health.tries} tries: {_words(outcome)}"
            return Scored(lost=(Lost(batch.headers[0], reason),))
        self._totals["retries"] += 1
        return await self._all([(None, one) for one in _singles(batch)], tries - whole)

    async def _tries(
        self,
        tries: int,
        what: str,
        tokens: int,
        group: str | None,
        work: Callable[[Replica], Coroutine[Any, Any, Result]],
        home: _Seat | None = None,
    ) -> Result | Exception:
        """What the first replica that can makes of the work, or the last error."""
        failure: Exception | None = None
        for _ in range(tries):
            self._totals["retries"] += failure is not None
            place = await self._place(tokens, group, home if failure is None else None)
            try:
                return await self._on_a_replica(place, what, work)
            except Exception as error:
                failure = error
        assert failure is not None
        return failure

    async def _place(self, tokens: int, group: str | None, home: _Seat | None) -> Place[_Seat]:
        place = None if home is None else self.balancer.take_on(home, tokens)
        try:
            return place or await self.balancer.take(tokens, group)
        except NoReplica as error:
            raise self._all_gone() from error

    async def _on_a_replica(
        self, place: Place[_Seat], what: str, work: Callable[[Replica], Coroutine[Any, Any, Result]]
    ) -> Result:
        started = self._clock()
        result = await self._call(place, what, work)
        self._seconds.append(self._clock() - started)
        place.replica.rebuilds = 0
        return result

    async def _call(
        self, place: Place[_Seat], what: str, work: Callable[[Replica], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Within its bound; gives the place back. What fails is a failure of the replica."""
        seat, replica = place.replica, place.replica.replica
        try:
            bound = self._bound(place.outstanding)
            return await self._alarm.within(bound, f"{what} on /{seat.index}", work(replica))
        except Exception as error:
            self._failed(seat, replica, error)
            raise
        finally:
            self.balancer.release(place)

    async def _scored(self, batch: Batch, replica: Replica) -> Batch:
        samples = await replica.score(batch)
        check(self._name, batch, samples)
        return samples

    def _bound(self, tokens: int) -> float:
        """Seconds that a call may take on a replica with so many tokens outstanding."""
        return self._health.timeout_s + tokens / self._health.min_tokens_per_s

    # ── health ─────────────────────────────────────────────────────────────────────────────────

    def _failed(self, seat: _Seat, replica: Replica, error: Exception) -> None:
        self._totals["failures"] += 1
        self._last_failure = _words(error)
        if seat.mending or seat.replica is not replica:
            return  # known already, or a late answer of one that has been replaced
        seat.mending = True
        self._whole.clear()
        self.balancer.eject(seat)
        self._note(seat, f"ejected: {self._last_failure}")
        self._suspects.put_nowait(seat)

    async def _mend(self, seat: _Seat) -> None:
        """Until the replica serves again, itself or another in its place, or is given up."""
        if isinstance(self._health, EndpointHealth):
            await self._await_back(seat, self._health.patience_s)
        else:
            await self._revive(seat, self._health.probes)

    async def _await_back(self, seat: _Seat, patience_s: float) -> None:
        """Probes a server that nobody here can rebuild, each time later."""
        failed, deadline = 0, self._clock() + patience_s
        while self._clock() < deadline:
            await self._alarm.pause(min(self._delay(failed), LONGEST_DELAY_S))
            if await self._lives(seat) and await self._proves_itself(seat):
                self._serves_again(seat, "serves again")
                return
            failed += 1
        self._give_up(seat)

    async def _revive(self, seat: _Seat, probes: int) -> None:
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
        self._weights = weights
        await asyncio.gather(*(self._load(seat, weights) for seat in self._seats))

    async def _load(self, seat: _Seat, weights: Weights) -> None:
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
        work = replica.load(weights.directory)
        await self._alarm.within(weights.timeout_s, "loading weights", work)

    async def _rebuilt(self, seat: _Seat, rebuild: Rebuild) -> None:
        """Another replica in its place, with the newest weights."""
        replica = seat.replica = await rebuild(self._teacher, seat.index, seat.replica)
        taken = None
        while taken is not self._weights:
            taken = self._weights
            assert taken is not None
            await self._take(replica, taken)

    async def _replace(self, seat: _Seat) -> None:
        while self._rebuild is not None and seat.rebuilds < self._rebuilds:
            await self._alarm.pause(self._delay(seat.rebuilds))
            seat.rebuilds += 1
            self._note(seat, "is being rebuilt")
            try:
                await self._rebuilt(seat, self._rebuild)
            except Exception as error:
                self._last_failure = _words(error)
                self._note(seat, f"could not be rebuilt: {self._last_failure}")
                continue
            self._totals["rebuilds"] += 1
            seat.stale = False
            self._serves_again(seat, "is rebuilt")
            return
        self._give_up(seat)

    def _give_up(self, seat: _Seat) -> None:
        self._note(seat, "is gone for good")
        seat.gone = True
        self.balancer.remove(seat)
        self._settled()

    def _serves_again(self, seat: _Seat, words: str) -> None:
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
        self._asleep = False
        await self._each("waking up", lambda replica: replica.wake())

    async def sleep(self) -> None:
        """Waits for what is being mended, then all replicas leave their GPUs."""
        failed = True
        while failed:
            await self._whole.wait()
            failed = await self._each("going to sleep", lambda replica: replica.sleep())
        self._asleep = True

    async def _each(self, what: str, work: Callable[[Sleeper], Coroutine[Any, Any, None]]) -> bool:
        """Does it with every replica that serves. Whether one failed."""

        async def one(seat: _Seat) -> bool:
            replica = seat.replica
            assert isinstance(replica, Sleeper)
            try:
                await self._alarm.within(self._health.timeout_s, what, work(replica))
            except Exception as error:
                self._failed(seat, replica, error)
                return True
            return False

        return any(await asyncio.gather(*(one(seat) for seat in self._seats if not seat.mending)))

    async def _lives(self, seat: _Seat) -> bool:
        return await self._succeeds(self._health.timeout_s, "a sign of life", seat.replica.ready())

    async def _proves_itself(self, seat: _Seat) -> bool:
        if self._example is None:
            return True
        work = self._scored(self._example, seat.replica)
        return await self._succeeds(self._bound(_tokens(self._example)), "a probe", work)

    async def _succeeds(self, bound: float, what: str, work: Coroutine[Any, Any, Any]) -> bool:
        try:
            await self._alarm.within(bound, what, work)
        except Exception as error:
            self._last_failure = _words(error)
            return False
        return True

    def _delay(self, before: int) -> float:
        """0, 1, 3, 7 … times ``probe_s``: at once, then later and later."""
        return float(self._health.probe_s * (2 ** min(before, 16) - 1))

    def _note(self, seat: _Seat, words: str) -> None:
        self._notes.append(f"{self._name}/{seat.index} {words}")

    def _all_gone(self) -> NoReplica:
        return NoReplica(
            self._name,
            f"all {len(self._seats)} replicas are gone; the last failure: {self._last_failure}",
            "see run.log for what became of each, and Ray's session directory for their logs",
        )

    # ── what is going on ───────────────────────────────────────────────────────────────────────

    async def report(self) -> StageReport:
        """The replicas' reports as one, with the pool's own gauges. Totals are since the start.

        ``agreement`` is the mean over response tokens of log p(teacher) - log q(rollout), in nats,
        where the scores hold the sampled token's log-probability.
        """
        parts = await asyncio.gather(*(self._part(s) for s in self._seats if not s.mending))
        merged = merge_reports(part for part in parts if part is not None)
        counters = dict(merged.counters)
        gap, gap_tokens = counters.pop("gap", 0.0), counters.pop("gap_tokens", 0.0)
        self._early.update({key: int(counters.pop(key, 0.0)) for key in EARLY})
        gauges = {**merged.gauges, **self._totals}
        if any(self._early.values()):
            gauges |= {key: float(self._early[key]) for key in EARLY}
        if gap_tokens:
            gauges["agreement"] = gap / gap_tokens
        if self._weights is not None:
            gauges["version"] = float(self._weights.version)
        gauges["serving"] = float(self.balancer.serving)
        gauges["waiting"] = float(self.balancer.waiting)
        gauges["outstanding_tokens"] = float(sum(self.balancer.outstanding_tokens))
        seconds = sorted(self._seconds)
        for percent in (50, 99):
            if seconds:
                gauges[f"latency_p{percent}_s"] = seconds[(len(seconds) - 1) * percent // 100]
        notes, self._notes = tuple(self._notes), []
        waits = merged.waits_for if self.balancer.serving else "a replica that works"
        waits = "its turn" if self._asleep else waits
        return replace(merged, counters=counters, gauges=gauges, waits_for=waits, notes=notes)

    async def _part(self, seat: _Seat) -> StageReport | None:
        replica = seat.replica
        try:
            return await self._alarm.within(REPORT_S, "a report", replica.report())
        except StageTimeout:
            return None
        except Exception as error:
            if not self._asleep:  # else it is found out, and mended, when it is its turn
                self._failed(seat, replica, error)
            return None


def _tokens(batch: Batch) -> int:
    return sum(header.tokens for header in batch.headers)


def _group(batch: Batch) -> str | None:
    """The prompt of rollouts that are all of one group: a replica may have it in its cache."""
    prompts = {header.uid.rpartition("/")[0] for header in batch.headers}
    return prompts.pop() if len(prompts) == 1 else None


def _singles(batch: Batch) -> list[Batch]:
    """Each item as a batch of its own."""
    singles = []
    while len(batch):
        one, batch = batch.split(1)
        singles.append(one)
    return singles


def _words(error: Exception) -> str:
    """An error in one line."""
    kind = "" if isinstance(error, StageError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:500]
