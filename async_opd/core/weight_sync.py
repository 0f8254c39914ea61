"""One weight sync, as a state machine over the sender and its receivers.

    IDLE ── snapshot(v) ──► READY ── push ──► MET ──► PAUSED ──► each replica: receive, name, resume
                                     ▲         │         │                    │
                                     │         └─────────┴──── a part fails ──┤ all have v
                                     │                              │         ▼
                                     └── those still behind ◄── SORTED OUT   IDLE

    READY       the trainer has copied its weights out and trains on
    MET         the wave is a collective group; it stays one until a member of it fails
    PAUSED      every replica of the wave holds its requests in flight (on_sync says how)
    SORTED OUT  whose weights were not touched generates on with the old ones; who failed, did not
                answer in time, or may hold half of the new weights, is lost: it is never resumed,
                but rebuilt by its pool, and ``rejoin``s with the newest snapshot

All replicas are one wave, or, rolling, each is a wave of its own: then the others go on generating
with their old weights meanwhile. A push without any replica left is done: whoever rejoins has its
weights. A failure that no replica is to blame for is the sender's; ``tries`` bounds it. A sender
that is dead, or that hangs beyond the bound of its own collective, ends the push: ProcessDied.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from async_opd.core.errors import (
    ProcessDied,
    StageError,
    StageTimeout,
    SyncTimeout,
    TransferAborted,
    WeightSyncError,
)
from async_opd.core.stages import SyncReport
from async_opd.core.weights import Rendezvous, WeightMeta

Result = TypeVar("Result")

SENDER = -1
"""The sender's place among the members of a group, where receivers have their index."""


class WeightSender(Protocol):
    """The trainer's end. ``wave`` numbers the collective groups it is rank 0 of."""

    async def open(self, wave: int, world_size: int) -> Rendezvous:
        """Opens the meeting point of a group; it is there when this returns."""
        ...

    async def connect(self, wave: int) -> None:
        """Joins the group as rank 0 while the receivers join."""

    async def snapshot(self, version: int) -> WeightMeta:
        """Copies the weights out."""
        ...

    async def send(self, wave: int) -> None:
        """Broadcasts the snapshot to a group while its receivers receive."""


class WeightReceiver(Protocol):
    """One rollout replica's end."""

    async def alive(self) -> None:
        """Returns if it works, raises or hangs if not."""

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None: ...
    async def pause(self, on_sync: str) -> None: ...

    async def receive(self, meta: WeightMeta) -> None:
        """Takes the new weights. TransferAborted if it failed and still has all of the old."""

    async def finish(self, version: int) -> None: ...
    async def resume(self) -> None: ...


Failures = dict[int, Exception]
"""What went wrong in a wave, by receiver (or ``SENDER``)."""


class BroadcastSync:
    """Implements ``async_opd.core.stages.WeightSync`` by one broadcast per wave."""

    def __init__(
        self,
        sender: WeightSender,
        receivers: Sequence[WeightReceiver],
        workers: Sequence[int],
        *,
        on_sync: str,
        timeout_s: float,
        drain_timeout_s: float | None = None,
        rolling: bool = False,
        tries: int = 1,
        lost: Callable[[int, Exception], None] = lambda index, error: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``workers[i]`` is the number of ranks that receiver i contributes to its group.

        ``drain_timeout_s`` bounds the pause, which with ``finish`` lasts as long as the longest
        response; by default ``timeout_s``. ``lost(index, error)`` is told of a receiver that has
        to be rebuilt.
        """
        self._sender = sender
        self._receivers = list(receivers)
        self._workers = list(workers)
        self._rolling = rolling
        self._alive = set(range(len(self._receivers)))
        self._met: dict[int, list[int]] = {}
        self._on_sync = on_sync
        self._timeout_s = timeout_s
        self._drain_timeout_s = drain_timeout_s or timeout_s
        self._tries = tries
        self._lost = lost
        self._clock = clock
        self._snapshot: tuple[int, WeightMeta] | None = None
        self._stalls = [0.0] * len(self._receivers)
        self._one_at_a_time = asyncio.Lock()  # snapshots, pushes, rejoins
        self._timings = {"sync/pause_s": 0.0, "sync/transfer_s": 0.0}

    # ── who takes part ─────────────────────────────────────────────────────────────────────────

    def lose(self, index: int) -> None:
        """Receiver ``index`` has died: the next push meets without it."""
        self._alive.discard(index)

    async def rejoin(self, index: int, receiver: WeightReceiver, workers: int) -> None:
        """Another receiver in place of one that was lost; it has the newest weights afterwards.

        Raises WeightSyncError. Its wave meets anew before the next push.
        """
        async with self._one_at_a_time:
            self._receivers[index], self._workers[index] = receiver, workers
            self._met = {n: wave for n, wave in self._met.items() if index not in wave}
            if self._snapshot is not None:
                number = index if self._rolling else 1 + index
                failures = await self._update(number, [index], *self._snapshot)
                if failures:
                    self._met.pop(number, None)
                    raise _worst(failures)
            self._alive.add(index)

    async def connect(self) -> None:
        """The rendezvous. Raises WeightSyncError if a member does not come in time."""
        for number, wave in self._waves(self._alive).items():
            failures = await self._meet(number, wave)
            if failures:
                raise _worst(failures)

    async def forget(self) -> None:
        """The sender was restarted: it has no snapshot and belongs to no group."""
        async with self._one_at_a_time:
            self._snapshot = None
            self._met.clear()

    # ── a sync ─────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, version: int, again: bool = False) -> None:
        """Copies the trainer's weights out as ``version``."""
        async with self._one_at_a_time:
            work = self._sender.snapshot(version)
            self._snapshot = version, await self._bounded("the snapshot", work)

    async def push(self) -> SyncReport:
        """Brings the snapshot to every replica that is alive, wave by wave."""
        async with self._one_at_a_time:
            if self._snapshot is None:
                raise WeightSyncError("weight sync", "push without a snapshot")
            started = self._clock()
            self._timings = dict.fromkeys(self._timings, 0.0)
            rounds = await self._push(*self._snapshot)
            return self._report(self._clock() - started, rounds)

    async def _push(self, version: int, meta: WeightMeta) -> int:
        """Until nobody is behind. Returns how many rounds that took."""
        behind = set(self._alive)
        rounds = blameless = 0
        while behind:
            rounds += 1
            worst: Exception | None = None
            lost = False
            for number, wave in self._waves(behind).items():
                if self._rolling and wave[0] not in self._alive:
                    continue  # it died while the others were updated
                failures = await self._update(number, wave, version, meta)
                if failures:
                    lost |= await self._sort_out(number, failures)
                    worst = _worst(failures)
                behind -= set(wave) - set(failures)
            behind &= self._alive
            blameless += worst is not None and not lost
            if worst is not None and blameless >= self._tries:
                raise worst
        return rounds

    def _report(self, seconds: float, rounds: int) -> SyncReport:
        assert self._snapshot is not None
        version, meta = self._snapshot
        alive = sorted(self._alive)
        stalls = [self._stalls[index] for index in alive] or [0.0]
        metrics = {
            "sync/seconds": seconds,
            **self._timings,
            "sync/mib": meta.nbytes / 2**20,
            "sync/rounds": float(rounds),
            "sync/stall_mean_s": statistics.fmean(stalls),
            "sync/stall_max_s": max(stalls),
        }
        metrics |= {f"sync/student/{index}/stall_s": self._stalls[index] for index in alive}
        return SyncReport(version=version, nbytes=meta.nbytes, metrics=metrics)

    # ── one wave ───────────────────────────────────────────────────────────────────────────────

    async def _update(
        self, number: int, wave: list[int], version: int, meta: WeightMeta
    ) -> Failures:
        """Meets if it has to, pauses, sends. Who is not among the failures has the version."""
        who = _names(wave)
        if self._met.get(number) != wave:
            failures = await self._meet(number, wave)
            if failures:
                return failures | await self._silent(wave, failures)
        started = self._clock()
        pauses = {index: self._receivers[index].pause(self._on_sync) for index in wave}
        failures = await self._each(f"pausing {who}", pauses, self._drain_timeout_s)
        paused = self._clock()
        self._timings["sync/pause_s"] += paused - started
        if failures:
            return failures | await self._resumed(wave, failures)
        works: dict[int, Awaitable[None]] = {SENDER: self._sender.send(number)}
        works |= {index: self._take(index, version, meta, started) for index in wave}
        failures = await self._each(f"the broadcast to {who}", works)
        self._timings["sync/transfer_s"] += self._clock() - paused
        return failures

    async def _meet(self, number: int, wave: list[int]) -> Failures:
        """The rendezvous of a wave: nobody's weights are touched."""
        self._met.pop(number, None)
        who, sizes = _names(wave), [self._workers[index] for index in wave]
        opening = self._sender.open(number, 1 + sum(sizes))
        try:
            rendezvous = await self._bounded(f"opening the meeting point of {who}", opening)
        except (WeightSyncError, ProcessDied) as error:
            return {SENDER: error}
        offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]
        works: dict[int, Awaitable[None]] = {SENDER: self._sender.connect(number)}
        for index, offset in zip(wave, offsets, strict=True):
            works[index] = self._receivers[index].join(rendezvous, offset)
        failures = await self._each(f"the rendezvous of {who}", works)
        if not failures:
            self._met[number] = list(wave)
        return {index: _unmet(index, error) for index, error in failures.items()}

    async def _take(self, index: int, version: int, meta: WeightMeta, started: float) -> None:
        """One receiver's part; it generates again at its end, unless it may hold half of both."""
        receiver = self._receivers[index]
        try:
            await receiver.receive(meta)
        except TransferAborted:
            await receiver.resume()
            raise
        await receiver.finish(version)
        await receiver.resume()
        self._stalls[index] = self._clock() - started

    async def _resumed(self, wave: list[int], failures: Failures) -> Failures:
        """Those that were paused in vain go on with the old weights; they are behind."""
        healthy = [index for index in wave if index not in failures]
        works = {index: self._receivers[index].resume() for index in healthy}
        failed = await self._each(f"resuming {_names(healthy)}", works)
        return {index: TransferAborted(*_VAIN) for index in healthy} | failed

    async def _silent(self, wave: list[int], failures: Failures) -> Failures:
        """Those of a wave that did not meet, with the errors of who does not even answer."""
        left = [i for i in wave if not isinstance(failures.get(i), StageTimeout)]
        works = {index: self._receivers[index].alive() for index in left}
        failed = await self._each(f"a sign of life of {_names(left)}", works)
        return {index: failures.get(index, TransferAborted(*_VAIN)) for index in left} | failed

    async def _sort_out(self, number: int, failures: Failures) -> bool:
        """The wave is no group any more; who is to blame is lost. Whether there was somebody."""
        self._met.pop(number, None)
        dead = {i for i, e in failures.items() if not isinstance(e, TransferAborted)} - {SENDER}
        for index in sorted(dead):
            self.lose(index)
            self._lost(index, failures[index])
        sender = failures.get(SENDER)
        if isinstance(sender, ProcessDied):
            raise sender
        if isinstance(sender, StageTimeout):
            raise ProcessDied("trainer", f"it hangs: {sender.cause}", sender.remedy)
        return bool(dead)

    def _waves(self, indices: set[int]) -> dict[int, list[int]]:
        """The groups by number: all together, or each alone."""
        wave = sorted(indices)
        if self._rolling:
            return {index: [index] for index in wave}
        return {0: wave} if wave else {}

    # ── bounds ─────────────────────────────────────────────────────────────────────────────────

    async def _each(
        self, what: str, works: Mapping[int, Awaitable[None]], timeout_s: float | None = None
    ) -> Failures:
        """Waits for all of them, each bounded; the errors by key."""
        bounded = (self._bounded(what, work, timeout_s) for work in works.values())
        results = await asyncio.gather(*bounded, return_exceptions=True)
        failures: Failures = {}
        for index, result in zip(works, results, strict=True):
            if isinstance(result, Exception):
                failures[index] = result
            elif isinstance(result, BaseException):
                raise result
        return failures

    async def _bounded(
        self, what: str, work: Awaitable[Result], timeout_s: float | None = None
    ) -> Result:
        timeout_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except (ProcessDied, TransferAborted):
            raise
        except TimeoutError as error:
            raise SyncTimeout(
                "weight sync",
                f"{what} took longer than {timeout_s:g} s with {len(self._receivers)} replicas",
                "raise sync.timeout_s if the model is large; otherwise a replica hangs",
            ) from error
        except Exception as error:
            cause = error.cause if isinstance(error, StageError) else error
            raise WeightSyncError(
                "weight sync", f"{what} failed: {type(error).__name__}: {cause}"
            ) from error


_VAIN = ("weight sync", "the sync failed elsewhere")


def _unmet(index: int, error: Exception) -> Exception:
    """A failure of a rendezvous: it takes nobody's weights, and a sender that waits hangs not."""
    if isinstance(error, ProcessDied if index == SENDER else StageTimeout):
        return error
    kind = WeightSyncError if index == SENDER else TransferAborted
    return kind("weight sync", error.cause if isinstance(error, StageError) else str(error))


def _worst(failures: Failures) -> Exception:
    """The failure that says most: the last of a receiver's own, or else the sender's."""
    order = sorted(failures.items(), key=lambda item: isinstance(item[1], TransferAborted))
    receivers = [error for index, error in order if index != SENDER]
    found = receivers[0] if receivers else failures[SENDER]
    if isinstance(found, TransferAborted) and SENDER in failures:
        return failures[SENDER]
    return found


def _names(wave: Sequence[int]) -> str:
    if len(wave) == 1:
        return f"student/{wave[0]}"
    return f"student/{wave[0]}…{wave[-1]}" if wave else "nobody"
