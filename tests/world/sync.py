"""Both ends of a weight sync, whose every part can fail or hang."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from async_opd.core.errors import ProcessDied, StageError, TransferAborted
from async_opd.core.reports import Progress, SyncReport
from async_opd.sharing.time_sharing import GpuLock, holding
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from tests.world.clock import Pace

META = WeightMeta(("w",), ("float32",), ((2, 3),), (4,))


class FakeSync:
    """A whole sync: the students have the trainer's version when it is pushed."""

    def __init__(self, trainer: Any, students: Sequence[Any], pace: Pace) -> None:
        self.trainer, self.students, self.pace = trainer, students, pace
        self.fail = False
        self.snapshots: list[tuple[int, bool]] = []
        self.verified: int | None = None

    async def snapshot(self, version: int, again: bool = False) -> None:
        self.snapshots.append((version, again))
        self.trainer.version = version

    async def push(self) -> SyncReport:
        await self.pace.wait()
        if self.fail:
            raise StageError("weight sync", "the broadcast failed")
        for student in self.students:
            student.version = self.trainer.version
        self.verified = self.trainer.version
        return SyncReport(self.trainer.version, {"sync/seconds": 0.1})


class Sender:
    """The trainer's end. ``fails`` counts sends that break, for no receiver's fault."""

    def __init__(self, events: list[str] | None = None, receivers: Sequence[Receiver] = ()) -> None:
        self.events = [] if events is None else events
        self.receivers = receivers
        self.worlds: list[int] = []
        self.compared: list[bool] = []
        self.fails = 0
        self.dead = self.hangs = False

    async def open(self, group: int, world_size: int, connected: Any = ()) -> Rendezvous:
        self.worlds.append(world_size)
        return Rendezvous("host", 1, world_size, 1.0, 1, b"secret")

    async def connect(self, group: int) -> None: ...

    async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
        self.events.append(f"snapshot {version}")
        self.compared.append(compare)
        return self.meta(compare)

    def meta(self, compare: bool) -> WeightMeta:
        """What a snapshot has."""
        return META

    async def send(self, group: int) -> float:
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise ProcessDied("trainer", "its process died")
        if self.fails:
            self.fails -= 1
            for receiver in self.receivers:
                receiver.aborts = 1
            raise RuntimeError("connection reset")
        self.events.append("send")
        return 0.25

    async def progress(self) -> Progress:
        return Progress(0)

    async def wake(self) -> None: ...

    async def idle(self) -> None:
        await asyncio.Event().wait()


class Receiver:
    """An engine's end. ``fail`` and ``hang`` name the part that goes wrong.

    ``aborts`` counts broken transfers; with ``loads`` one leaves weights of two versions: it
    refuses to resume then.
    """

    def __init__(self, events: list[str] | None = None, fail: str = "", hang: str = "") -> None:
        self.events = [] if events is None else events
        self.fail, self.hang = fail, hang
        self.offset = -1
        self.version = self.aborts = 0
        self.loads = self.mixed = self.paused = False
        self.tokens = self.generates = 0
        self.finished = asyncio.Event()
        self.finished.set()

    async def part(self, name: str) -> None:
        """A part of a sync, or of another call."""
        if self.fail == name:
            raise RuntimeError("broken pipe")
        if self.hang == name:
            await asyncio.Event().wait()
        self.events.append(name)

    async def alive(self) -> None:
        if "alive" in (self.fail, self.hang):
            raise RuntimeError("dead")

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        if self.fail in ("join", "alive"):
            raise RuntimeError("nobody came")
        self.offset = rank_offset

    async def progress(self) -> Progress:
        self.tokens += self.generates
        if self.tokens >= 1000:
            self.finished.set()
        return Progress(self.tokens, 1000)

    async def pause(self, on_sync: str) -> None:
        await self.finished.wait()
        await self.part(f"pause {on_sync}")
        self.paused = True

    async def receive(self, meta: WeightMeta) -> None:
        if self.aborts:
            self.aborts -= 1
            self.mixed = self.loads
            raise TransferAborted("student", "connection reset")
        await self.part("receive")
        self.mixed = False

    async def finish(self, version: int) -> None:
        await self.part(f"finish {version}")
        self.version = version

    async def resume(self) -> None:
        if self.mixed:
            raise TransferAborted("student", "it stays paused")
        await self.part("resume")
        self.paused = False


class LockedSync:
    """A weight sync under the locks that ``SharedGpus`` takes for it."""

    def __init__(self, inner: Any, *, replicas: GpuLock | None, trainer: GpuLock | None) -> None:
        self._inner, self._replicas, self._trainer = inner, replicas, trainer

    async def snapshot(self, version: int, again: bool = False) -> None:
        async with holding("a snapshot", self._trainer):
            await self._inner.snapshot(version, again)

    async def push(self) -> Any:
        async with holding("a weight sync", self._replicas, self._trainer):
            return await self._inner.push()
