"""One wave of a weight sync: replicas that meet, pause, and take one broadcast together.

    meet ──► pause ──► each replica: receive, name, resume
      └────────┴────────────┴──► who failed, by index: the rest has the new version

Nobody's weights are touched before the broadcast. What becomes of who failed, and when a wave meets
again, is ``async_opd.core.weight_sync``'s affair.
"""

from __future__ import annotations

import asyncio
import math
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
from async_opd.core.patience import Patience, Progress
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
    async def pause(self, on_sync: str) -> None:
        """Stops; ``finish`` waits for what is in flight, however long its responses become."""

    async def progress(self) -> Progress:
        """The tokens of its engine."""
        ...

    async def receive(self, meta: WeightMeta) -> None:
        """Takes the new weights. TransferAborted if it failed and still has all of the old."""

    async def finish(self, version: int) -> None: ...
    async def resume(self) -> None: ...


Failures = dict[int, Exception]
"""What went wrong in a wave, by receiver (or ``SENDER``)."""


class Waves:
    """The sender and all receivers; a wave is a list of their indices, and has a number."""

    def __init__(
        self,
        sender: WeightSender,
        receivers: Sequence[WeightReceiver],
        workers: Sequence[int],
        *,
        on_sync: str,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """See ``BroadcastSync``."""
        self.receivers = list(receivers)
        self.stalls = [0.0] * len(self.receivers)
        self.timings = {"sync/pause_s": 0.0, "sync/transfer_s": 0.0}
        self._sender = sender
        self._workers = list(workers)
        self._met: dict[int, list[int]] = {}
        self._on_sync = on_sync
        self._timeout_s = timeout_s
        self._clock = clock

    def seat(self, index: int, receiver: WeightReceiver, workers: int) -> None:
        """Another receiver in place of one that was lost; its wave meets anew."""
        self.receivers[index], self._workers[index] = receiver, workers
        self._met = {n: wave for n, wave in self._met.items() if index not in wave}

    def forget(self) -> None:
        """The sender was restarted: it belongs to no group."""
        self._met.clear()

    def disband(self, number: int) -> None:
        """The wave is no group any more."""
        self._met.pop(number, None)

    def restart_timings(self) -> None:
        """From zero."""
        self.timings = dict.fromkeys(self.timings, 0.0)

    async def snapshot(self, version: int) -> WeightMeta:
        """Copies the sender's weights out."""
        return await self._bounded("the snapshot", self._sender.snapshot(version))

    async def update(
        self, number: int, wave: list[int], version: int, meta: WeightMeta
    ) -> Failures:
        """Meets if it has to, pauses, sends. Who is not among the failures has the version."""
        who = _names(wave)
        if self._met.get(number) != wave:
            failures = await self.meet(number, wave)
            if failures:
                return failures | await self._silent(wave, failures)
        started = self._clock()
        if self._on_sync == "finish":
            drains = {index: self._drained(index) for index in wave}
            failures = await self._each(f"pausing {who}", drains, math.inf)
        else:
            pauses = {index: self.receivers[index].pause(self._on_sync) for index in wave}
            failures = await self._each(f"pausing {who}", pauses)
        paused = self._clock()
        self.timings["sync/pause_s"] += paused - started
        if failures:
            return failures | await self._resumed(wave, failures)
        works: dict[int, Awaitable[None]] = {SENDER: self._sender.send(number)}
        works |= {index: self._take(index, version, meta, started) for index in wave}
        failures = await self._each(f"the broadcast to {who}", works)
        self.timings["sync/transfer_s"] += self._clock() - paused
        return failures

    async def _drained(self, index: int) -> None:
        """It has paused, after the responses in flight: bounded by the time between tokens."""
        receiver = self.receivers[index]
        patience = Patience(f"student/{index}", self._timeout_s, "sync.timeout_s")
        await patience.within("finishing", receiver.pause(self._on_sync), receiver.progress)

    async def meet(self, number: int, wave: list[int]) -> Failures:
        """The rendezvous of a wave: nobody's weights are touched."""
        self.disband(number)
        who, sizes = _names(wave), [self._workers[index] for index in wave]
        opening = self._sender.open(number, 1 + sum(sizes))
        try:
            rendezvous = await self._bounded(f"opening the meeting point of {who}", opening)
        except (WeightSyncError, ProcessDied) as error:
            return {SENDER: error}
        offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]
        works: dict[int, Awaitable[None]] = {SENDER: self._sender.connect(number)}
        for index, offset in zip(wave, offsets, strict=True):
            works[index] = self.receivers[index].join(rendezvous, offset)
        failures = await self._each(f"the rendezvous of {who}", works)
        if not failures:
            self._met[number] = list(wave)
        return {index: _unmet(index, error) for index, error in failures.items()}

    async def _take(self, index: int, version: int, meta: WeightMeta, started: float) -> None:
        """One receiver's part; it generates again at its end, unless it may hold half of both."""
        receiver = self.receivers[index]
        try:
            await receiver.receive(meta)
        except TransferAborted:
            await receiver.resume()
            raise
        await receiver.finish(version)
        await receiver.resume()
        self.stalls[index] = self._clock() - started

    async def _resumed(self, wave: list[int], failures: Failures) -> Failures:
        """Those that were paused in vain go on with the old weights; they are behind."""
        healthy = [index for index in wave if index not in failures]
        works = {index: self.receivers[index].resume() for index in healthy}
        failed = await self._each(f"resuming {_names(healthy)}", works)
        return {index: TransferAborted(*_VAIN) for index in healthy} | failed

    async def _silent(self, wave: list[int], failures: Failures) -> Failures:
        """Those of a wave that did not meet, with the errors of who does not even answer."""
        left = [i for i in wave if not isinstance(failures.get(i), StageTimeout)]
        works = {index: self.receivers[index].alive() for index in left}
        failed = await self._each(f"a sign of life of {_names(left)}", works)
        return {index: failures.get(index, TransferAborted(*_VAIN)) for index in left} | failed

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
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                return await work
        except (ProcessDied, TransferAborted):
            raise
        except StageTimeout as error:  # another bound than this one
            words = f"{what}: {error.stage}: {error.cause}"
            raise SyncTimeout("weight sync", words, error.remedy) from error
        except TimeoutError as error:
            raise SyncTimeout(
                "weight sync",
                f"{what} took longer than {timeout_s:g} s with {len(self.receivers)} replicas",
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


def _names(wave: Sequence[int]) -> str:
    if len(wave) == 1:
        return f"student/{wave[0]}"
    return f"student/{wave[0]}…{wave[-1]}" if wave else "nobody"
