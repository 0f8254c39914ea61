"""One weight sync, as a state machine over the sender and its receivers.

    IDLE ── snapshot(v) ──► READY ── push ──► PAUSED ──► SENDING ──► NAMED ──► IDLE
                                                 │           │          │
                                                 └───────────┴──────────┴──► FAILED

    READY    the trainer has copied its weights out and trains on
    PAUSED   every replica holds its requests in flight (on_sync says how)
    SENDING  the sender broadcasts, every replica receives, all in the same collective
    NAMED    every replica reports version v, and generates again
    FAILED   which replica, which part, why: a WeightSyncError; generation is not resumed on a
             replica that may hold half of the weights

The rendezvous happens once, before the first push.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from async_opd.core.errors import WeightSyncError
from async_opd.core.stages import SyncReport
from async_opd.core.weights import Rendezvous, WeightMeta

Result = TypeVar("Result")


class WeightSender(Protocol):
    """The trainer's end."""

    async def open(self, world_size: int) -> Rendezvous:
        """Opens the meeting point; it is there when this returns."""
        ...

    async def connect(self) -> None:
        """Joins the group as rank 0 while the receivers join."""

    async def snapshot(self, version: int) -> WeightMeta:
        """Copies the weights out."""
        ...

    async def send(self) -> None:
        """Broadcasts the snapshot while the receivers receive."""


class WeightReceiver(Protocol):
    """One rollout replica's end."""

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None: ...
    async def pause(self, on_sync: str) -> None: ...
    async def receive(self, meta: WeightMeta) -> None: ...
    async def finish(self, version: int) -> None: ...
    async def resume(self) -> None: ...


class BroadcastSync:
    """Implements ``async_opd.core.stages.WeightSync`` by one broadcast to all replicas."""

    def __init__(
        self,
        sender: WeightSender,
        receivers: Sequence[WeightReceiver],
        workers: Sequence[int],
        *,
        on_sync: str,
        timeout_s: float,
        drain_timeout_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``workers[i]`` is the number of ranks that receiver i contributes to the group.

        ``drain_timeout_s`` bounds the pause, which with ``finish`` lasts as long as the longest
        response; by default ``timeout_s``.
        """
        self._sender = sender
        self._receivers = list(receivers)
        self._workers = list(workers)
        self._on_sync = on_sync
        self._timeout_s = timeout_s
        self._drain_timeout_s = drain_timeout_s or timeout_s
        self._clock = clock
        self._snapshot: tuple[int, WeightMeta] | None = None

    async def connect(self) -> None:
        """The rendezvous. Raises WeightSyncError if a member does not come in time."""
        rendezvous = await self._bounded(
            "opening the meeting point", self._sender.open(self._world)
        )
        offsets = [1 + sum(self._workers[:index]) for index in range(len(self._workers))]
        await self._together(
            "the rendezvous",
            self._sender.connect(),
            *(r.join(rendezvous, at) for r, at in zip(self._receivers, offsets, strict=True)),
        )

    async def snapshot(self, version: int) -> None:
        """Copies the trainer's weights out as ``version``."""
        meta = await self._bounded("the snapshot", self._sender.snapshot(version))
        self._snapshot = (version, meta)

    async def push(self) -> SyncReport:
        """Brings the snapshot to every replica."""
        if self._snapshot is None:
            raise WeightSyncError("weight sync", "push without a snapshot")
        version, meta = self._snapshot
        started = self._clock()
        pauses = asyncio.gather(*(r.pause(self._on_sync) for r in self._receivers))
        await self._bounded("pausing", pauses, self._drain_timeout_s)
        paused = self._clock()
        await self._together(
            "the broadcast", self._sender.send(), *(r.receive(meta) for r in self._receivers)
        )
        sent = self._clock()
        await self._together("naming the version", *(r.finish(version) for r in self._receivers))
        await self._together("resuming", *(r.resume() for r in self._receivers))
        done = self._clock()
        return SyncReport(
            version=version,
            nbytes=meta.nbytes,
            metrics={
                "sync/seconds": done - started,
                "sync/pause_s": paused - started,
                "sync/transfer_s": sent - paused,
                "sync/mib": meta.nbytes / 2**20,
            },
        )

    @property
    def _world(self) -> int:
        return 1 + sum(self._workers)

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
                f"{what} took longer than {timeout_s:g} s with {len(self._receivers)} "
                f"replicas and {self._world} ranks",
                "raise sync.timeout_s if the model is large; otherwise a replica hangs",
            ) from error
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                "weight sync", f"{what} failed: {type(error).__name__}: {error}"
            ) from error
