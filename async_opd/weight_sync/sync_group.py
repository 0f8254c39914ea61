"""A sync group: replicas that rendezvous, pause, and receive one broadcast together.

    rendezvous ──► pause ──► each replica: receive, finish, resume
        └────────────┴────────────┴──► failures by index; all other members run the new version

The broadcast is the first part that changes weights. ``async_opd.weight_sync.coordinator`` decides
what happens to the members that failed, and when a group is connected again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from async_opd.core.errors import (
    ProcessDied,
    StageError,
    StageTimeout,
    SyncTimeout,
    TransferAborted,
    WeightSyncError,
    WrongWeights,
)
from async_opd.core.reports import Progress
from async_opd.waiting.deadline import Deadline
from async_opd.waiting.liveness import ProgressWatchdog
from async_opd.weight_sync.freshness import Evidence
from async_opd.weight_sync.layout import HeldRow, Rendezvous, WeightMeta

Result = TypeVar("Result")

TIMINGS = ("sync/pause_s", "sync/transfer_s", "sync/resume_s", "sync/send_s", "sync/collective_s")
"""Seconds of a sync, over all its groups: until all receivers have paused; from then until the last
one has loaded the weights; from then until it generates again. Of the transfer, the sender's; and
of these, those in NCCL or gloo, which include waiting for receivers."""
SENDER = -1
"""The sender's key among the members of a group; a receiver's key is its index."""


class WeightSender(Protocol):
    """The trainer's end. ``group`` numbers the collective groups it is rank 0 of."""

    async def open(self, group: int, world_size: int, connected: Collection[int]) -> Rendezvous:
        """Opens the rendezvous of a group, which accepts connections when this returns.

        The sender leaves all groups but those that are still ``connected``.
        """
        ...

    async def connect(self, group: int) -> None:
        """Joins the group as rank 0 while the receivers join."""

    async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
        """Copies the weights out. ``compare``: the metadata has a reference."""
        ...

    async def send(self, group: int) -> float:
        """Broadcasts the snapshot to a group while its receivers receive.

        Returns the seconds in the collective library: NCCL, or gloo.
        """
        ...


class WeightReceiver(Protocol):
    """One rollout replica's end."""

    async def alive(self) -> None:
        """Returns if the replica works; raises or hangs if it does not."""

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None: ...
    async def pause(self, on_sync: str) -> None:
        """Stops generating; ``finish`` waits for all requests in flight, however long they are."""

    async def progress(self) -> Progress:
        """The tokens that the engine has computed."""
        ...

    async def receive(self, meta: WeightMeta) -> None:
        """Receives the new weights. TransferAborted if that broke off by a fault elsewhere."""

    async def finish(self, version: int) -> None: ...
    async def resume(self) -> None:
        """Generates again. TransferAborted if it has weights of two versions: it stays paused."""

    async def evidence(self, rows: Sequence[HeldRow]) -> Evidence:
        """Its engine's results for the rows, after ``resume``."""
        ...


Failures = dict[int, Exception]
"""The errors of a group, by receiver (or ``SENDER``)."""


class SyncGroups:
    """The sender and all receivers; a group is a list of their indices, and has a number."""

    def __init__(
        self,
        sender: WeightSender,
        receivers: Sequence[WeightReceiver],
        workers: Sequence[int],
        *,
        on_sync: str,
        timeout_s: float,
        seconds_per_byte: float,
        clock: Callable[[], float],
    ) -> None:
        """See ``BroadcastSync``."""
        self.receivers = list(receivers)
        self.stalls = [0.0] * len(self.receivers)
        self.timings = dict.fromkeys(TIMINGS, 0.0)
        self._sender = sender
        self._workers = list(workers)
        self._connected: dict[int, list[int]] = {}
        self._on_sync = on_sync
        self._timeout_s, self._seconds_per_byte = timeout_s, seconds_per_byte
        self._clock = clock
        self._loaded_at = 0.0  # when the last receiver of this update had loaded the weights

    def replace_receiver(self, index: int, receiver: WeightReceiver, workers: int) -> None:
        """Puts another receiver in place of a removed one; its groups have to connect again."""
        self.receivers[index], self._workers[index] = receiver, workers
        self._leave(index)

    def _leave(self, index: int) -> None:
        """Forgets the group that the member is in: a receiver is in one group only."""
        self._connected = {n: group for n, group in self._connected.items() if index not in group}

    def disband(self, number: int) -> None:
        """Forgets the group; it has to connect again before its next broadcast."""
        self._connected.pop(number, None)

    def restart_timings(self) -> None:
        """Sets all timings to zero."""
        self.timings = dict.fromkeys(self.timings, 0.0)

    def snapshot(self, version: int, compare: bool) -> Coroutine[Any, Any, WeightMeta]:
        """Copies the sender's weights out; see WeightSender.snapshot."""
        return self._bounded("the snapshot", self._sender.snapshot(version, compare))

    async def evidence(
        self, group: list[int], rows: Sequence[HeldRow]
    ) -> tuple[dict[int, Evidence], Failures]:
        """The evidence of the receivers, and the errors of those that give none.

        Rows may wait for a response to end, however long it is: bounded by progress.
        """
        found: dict[int, Evidence] = {}

        async def ask(index: int) -> None:
            receiver = self.receivers[index]
            watchdog = ProgressWatchdog(f"student/{index}", self._timeout_s, "sync.timeout_s")
            work = receiver.evidence(rows)
            found[index] = await watchdog.within("scoring held rows", work, receiver.progress)

        works = {index: ask(index) for index in group}
        return found, await self._each(f"comparing {_names(group)}", works, math.inf)

    async def update(
        self, number: int, group: list[int], version: int, meta: WeightMeta
    ) -> Failures:
        """Connects the group if needed, pauses it and broadcasts to it.

        Every member absent from the result now runs ``version``.
        """
        names = _names(group)
        if self._connected.get(number) != group:
            failures = await self.rendezvous(number, group)
            if failures:  # a member that hangs has failed too, though others raised the errors
                return failures | await self._unresponsive(group, failures)
        started = self._clock()
        if self._on_sync == "finish":  # bounded per member by progress: responses may be long
            drains = {index: self._drained(index) for index in group}
            failures = await self._each(f"pausing {names}", drains, math.inf)
        else:
            pauses = {index: self.receivers[index].pause(self._on_sync) for index in group}
            failures = await self._each(f"pausing {names}", pauses)
        paused = self._loaded_at = self._clock()
        self.timings["sync/pause_s"] += paused - started
        if failures:  # no weight has changed yet: the members that paused can generate on
            return failures | await self._resumed(group, failures)
        # Sender and receivers together: a broadcast is a collective, in which all take part.
        # Each receiver resumes as soon as it has finished (_receive), not when the last one has.
        works: dict[int, Awaitable[None]] = {SENDER: self._send(number)}
        works |= {index: self._receive(index, version, meta, started) for index in group}
        allowed_s = self._timeout_s + meta.nbytes * self._seconds_per_byte
        failures = await self._each(f"the broadcast to {names}", works, allowed_s)
        if failures:  # the time in which the broadcast broke off is none of resuming
            self._loaded_at = self._clock()
        self.timings["sync/transfer_s"] += self._loaded_at - paused
        self.timings["sync/resume_s"] += self._clock() - self._loaded_at
        return failures

    async def _send(self, number: int) -> None:
        """The sender's part of an update."""
        started = self._clock()
        collective_s = await self._sender.send(number)
        self.timings["sync/send_s"] += self._clock() - started
        self.timings["sync/collective_s"] += collective_s

    async def _drained(self, index: int) -> None:
        """Pauses after the requests in flight have ended; bounds the time between their tokens."""
        receiver = self.receivers[index]
        watchdog = ProgressWatchdog(f"student/{index}", self._timeout_s, "sync.timeout_s")
        await watchdog.within("finishing", receiver.pause(self._on_sync), receiver.progress)

    async def rendezvous(self, number: int, group: list[int]) -> Failures:
        """Connects a group, in place of those that its members had. It changes no weights."""
        self.disband(number)
        for index in group:
            self._leave(index)
        names, sizes = _names(group), [self._workers[index] for index in group]
        opening = self._sender.open(number, 1 + sum(sizes), tuple(self._connected))
        try:
            rendezvous = await self._bounded(f"opening the rendezvous of {names}", opening)
        except (WeightSyncError, ProcessDied) as error:
            return {SENDER: error}
        offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]
        works: dict[int, Awaitable[None]] = {SENDER: self._sender.connect(number)}
        for index, offset in zip(group, offsets, strict=True):
            works[index] = self.receivers[index].join(rendezvous, offset)
        failures = await self._each(f"the rendezvous of {names}", works)
        if not failures:
            self._connected[number] = list(group)
        return {index: _rendezvous_failure(index, error) for index, error in failures.items()}

    async def _receive(self, index: int, version: int, meta: WeightMeta, started: float) -> None:
        """One receiver's part of an update, after which it generates again.

        After TransferAborted it resumes with the old weights, or refuses to if it has not all of
        them: then it waits, paused, for the next try. Any other error is its own: it may have
        loaded what it should not, and is never resumed.
        """
        receiver = self.receivers[index]
        try:
            await receiver.receive(meta)
        except TransferAborted:
            await receiver.resume()
            raise
        await receiver.finish(version)
        self._loaded_at = self._clock()
        await receiver.resume()
        self.stalls[index] = self._clock() - started

    async def _resumed(self, group: list[int], failures: Failures) -> Failures:
        """Resumes the paused members with their old weights; the result names them as behind."""
        healthy = [index for index in group if index not in failures]
        works = {index: self.receivers[index].resume() for index in healthy}
        failed = await self._each(f"resuming {_names(healthy)}", works)
        return {index: TransferAborted(*_ABORTED_ELSEWHERE) for index in healthy} | failed

    async def _unresponsive(self, group: list[int], failures: Failures) -> Failures:
        """The members of a group whose rendezvous failed, with the errors of unresponsive ones.

        A member whose own failure is a timeout is known to hang, and is not asked again.
        """
        left = [i for i in group if not isinstance(failures.get(i), StageTimeout)]
        works = {index: self.receivers[index].alive() for index in left}
        failed = await self._each(f"a heartbeat of {_names(left)}", works)
        return {
            index: failures.get(index, TransferAborted(*_ABORTED_ELSEWHERE)) for index in left
        } | failed

    # ── bounds ─────────────────────────────────────────────────────────────────────────────────

    async def _each(
        self, what: str, works: Mapping[int, Awaitable[None]], timeout_s: float | None = None
    ) -> Failures:
        """Waits for all works, each within ``timeout_s``; returns the errors by key."""
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
        deadline = Deadline("weight sync")
        try:
            return await deadline.within(timeout_s or self._timeout_s, what, work, _SLOW)
        except (ProcessDied, TransferAborted, WrongWeights):
            raise
        except StageTimeout as error:  # this bound, or one inside of the work
            inner = "" if error.stage == "weight sync" else f"{what}: {error.stage}: "
            raise SyncTimeout("weight sync", inner + error.cause, error.remedy) from error
        except Exception as error:
            cause = error.cause if isinstance(error, StageError) else error
            raise WeightSyncError(
                "weight sync", f"{what} failed: {type(error).__name__}: {cause}"
            ) from error


_SLOW = "raise sync.timeout_s if the model is large, or lower sync.min_mib_per_s if the network is \
slow; otherwise a replica hangs"
_ABORTED_ELSEWHERE = ("weight sync", "the sync failed elsewhere")


def _rendezvous_failure(index: int, error: Exception) -> Exception:
    """The failure of a member, as the coordinator has to treat it after a rendezvous.

    A rendezvous changes no weights, so a receiver's error is TransferAborted: it stays a member. A
    receiver that hangs keeps its timeout and is ejected. A sender whose receiver never
    came does not hang: its timeout becomes a WeightSyncError, and only its death is kept.
    """
    if isinstance(error, ProcessDied if index == SENDER else StageTimeout):
        return error
    kind = WeightSyncError if index == SENDER else TransferAborted
    return kind("weight sync", error.cause if isinstance(error, StageError) else str(error))


def _names(group: Sequence[int]) -> str:
    if len(group) == 1:
        return f"student/{group[0]}"
    return f"student/{group[0]}…{group[-1]}" if group else "no replica"
