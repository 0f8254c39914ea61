"""One weight sync, as a state machine over the sender and its receivers.

    IDLE ── snapshot(v) ──► READY ── push ──► PAUSED ──► SENDING ──► NAMED ──► IDLE
                                        ▲        │           │          │
                                        │        └───────────┴──────────┴──► FAILED
                                        └── the next wave ◄──────────┘

    READY    the trainer has copied its weights out and trains on
    PAUSED   every replica of the wave holds its requests in flight (on_sync says how)
    SENDING  the sender broadcasts, every replica of the wave receives, all in one collective
    NAMED    every replica of the wave reports version v, and generates again
    FAILED   which replicas, which part, why: a WeightSyncError; generation is not resumed on a
             replica that may hold half of the weights

All replicas are one wave, or, rolling, each is a wave of its own: then the others go on generating
with their old weights meanwhile. Each wave is a collective group with its own rendezvous, which
happens before the first push, and again before the push after a replica has died.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from async_opd.core.errors import WeightSyncError
from async_opd.core.stages import SyncReport
from async_opd.core.weights import Rendezvous, WeightMeta

Result = TypeVar("Result")


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

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None: ...
    async def pause(self, on_sync: str) -> None: ...
    async def receive(self, meta: WeightMeta) -> None: ...
    async def finish(self, version: int) -> None: ...
    async def resume(self) -> None: ...


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``workers[i]`` is the number of ranks that receiver i contributes to its group.

        ``drain_timeout_s`` bounds the pause, which with ``finish`` lasts as long as the longest
        response; by default ``timeout_s``.
        """
        self._sender = sender
        self._receivers = list(receivers)
        self._workers = list(workers)
        self._rolling = rolling
        self._alive = list(range(len(self._receivers)))
        self._connected: list[list[int]] = []
        self._on_sync = on_sync
        self._timeout_s = timeout_s
        self._drain_timeout_s = drain_timeout_s or timeout_s
        self._clock = clock
        self._snapshot: tuple[int, WeightMeta] | None = None
        self._stalls = [0.0] * len(self._receivers)

    async def connect(self) -> None:
        """The rendezvous. Raises WeightSyncError if a member does not come in time."""
        self._connected = waves = self._waves()
        for number, wave in enumerate(waves):
            members = self._members(wave)
            sizes = [self._workers[index] for index in wave]
            rendezvous = await self._bounded(
                f"opening the meeting point of {members}",
                self._sender.open(number, 1 + sum(sizes)),
            )
            offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]
            await self._together(
                f"the rendezvous of {members}",
                self._sender.connect(number),
                *(
                    self._receivers[index].join(rendezvous, offset)
                    for index, offset in zip(wave, offsets, strict=True)
                ),
            )

    def lose(self, index: int) -> None:
        """Receiver ``index`` has died: the next push meets without it."""
        self._alive.remove(index)

    async def snapshot(self, version: int) -> None:
        """Copies the trainer's weights out as ``version``."""
        meta = await self._bounded("the snapshot", self._sender.snapshot(version))
        self._snapshot = (version, meta)

    async def push(self) -> SyncReport:
        """Brings the snapshot to every replica that is alive, wave by wave."""
        if self._snapshot is None:
            raise WeightSyncError("weight sync", "push without a snapshot")
        version, meta = self._snapshot
        started = self._clock()
        if self._connected != self._waves():
            await self.connect()
        pause_s = transfer_s = 0.0
        for number, wave in enumerate(self._connected):
            if self._rolling and wave[0] not in self._alive:
                continue  # it died while the others were updated; the next push meets without it
            paused, sent = await self._update(number, wave, version, meta)
            pause_s += paused
            transfer_s += sent
        metrics = {
            "sync/seconds": self._clock() - started,
            "sync/pause_s": pause_s,
            "sync/transfer_s": transfer_s,
            "sync/mib": meta.nbytes / 2**20,
            "sync/stall_mean_s": statistics.fmean(self._stalls[i] for i in self._alive),
            "sync/stall_max_s": max(self._stalls[i] for i in self._alive),
        }
        metrics |= {f"sync/student/{i}/stall_s": self._stalls[i] for i in self._alive}
        return SyncReport(version=version, nbytes=meta.nbytes, metrics=metrics)

    async def _update(
        self, number: int, wave: list[int], version: int, meta: WeightMeta
    ) -> tuple[float, float]:
        """One wave: pause, send, name, resume. Returns the seconds of pausing and of sending."""
        who, members = self._members(wave), [self._receivers[index] for index in wave]
        started = self._clock()
        pauses = asyncio.gather(*(member.pause(self._on_sync) for member in members))
        await self._bounded(f"pausing {who}", pauses, self._drain_timeout_s)
        paused = self._clock()
        receives = (member.receive(meta) for member in members)
        await self._together(f"the broadcast to {who}", self._sender.send(number), *receives)
        sent = self._clock()
        await self._together(f"naming the version of {who}", *(m.finish(version) for m in members))
        await self._together(f"resuming {who}", *(self._resume(index, started) for index in wave))
        return paused - started, sent - paused

    async def _resume(self, index: int, started: float) -> None:
        await self._receivers[index].resume()
        self._stalls[index] = self._clock() - started

    def _waves(self) -> list[list[int]]:
        return [[index] for index in self._alive] if self._rolling else [list(self._alive)]

    def _members(self, wave: list[int]) -> str:
        if len(wave) == 1:
            return f"student/{wave[0]}"
        return f"student/{wave[0]}…{wave[-1]}"

    async def _together(self, what: str, *parts: Awaitable[None]) -> None:
        await self._bounded(what, asyncio.gather(*parts))

    async def _bounded(
        self, what: str, work: Awaitable[Result], timeout_s: float | None = None
    ) -> Result:
        timeout_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError as error:
            raise WeightSyncError(
                "weight sync",
                f"{what} took longer than {timeout_s:g} s with {len(self._receivers)} replicas",
                "raise sync.timeout_s if the model is large; otherwise a replica hangs",
            ) from error
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                "weight sync", f"{what} failed: {type(error).__name__}: {error}"
            ) from error
