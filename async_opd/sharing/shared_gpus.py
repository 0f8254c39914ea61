"""The GPUs that pools of a run share with guests, for the rollout stage.

Locks are taken in this order, and released in the other:

    refreshing   a snapshot, and an evaluation's refresh of its replicas
    rollout      GPUs of the rollout engines: a rebuild, a weight sync
    train        GPUs of the trainer: a snapshot, a weight sync, whatever allocates there
    weight sync  that of ``BroadcastSync``, which the caller takes inside

Without shared GPUs only the first one exists.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from async_opd.config.run_config import RunConfig
from async_opd.core.stages import TRAINER
from async_opd.sharing.time_sharing import (
    GpuGuests,
    GpuHost,
    GpuLock,
    GpuTimeSharing,
    SeveralGuests,
    SharedLock,
    holding,
)
from async_opd.waiting.liveness import Ask, CombinedProgress, ProgressWatchdog, answer_s


class SharingTrainer(GpuHost, GpuGuests, Protocol):
    """A trainer whose GPUs teachers use, or that takes turns on those of rollout engines."""

    async def begin_turn(self, pool: str) -> None:
        """Returns in a turn, which lasts until the snapshot that follows is taken."""


class SharedGpus:
    """Alternates hosts and guests, and keeps what allocates on their GPUs apart."""

    def __init__(
        self,
        config: RunConfig,
        engines: Callable[[], Mapping[str, GpuHost]],
        progress: Ask,
        trainer: SharingTrainer,
        teachers: GpuGuests,
    ) -> None:
        """``engines()`` are the rollout engines that serve, ``progress`` counts their tokens.

        ``run`` expects its locks to be held: see ``acquire``.
        """
        quiet_s = config.timeouts.stall_s
        counts = {"rollouter": progress, "scorer": teachers.progress, TRAINER: trainer.progress}
        self._progress = CombinedProgress(counts, answer_s(quiet_s, depth=2))
        self._watchdog = ProgressWatchdog(TRAINER, quiet_s, "timeouts.stall_s")
        guests = {str(t.host): teachers for t in config.teachers.values() if t.host is not None}
        if config.rollout.host is not None:
            # The trainer is the guest: the engines finish what they have begun whenever it wants
            # the GPUs, and it gives them back when it waits.
            guests = {"rollout": SeveralGuests(*guests.values(), trainer)}
        self.locks = {pool: GpuLock(pool, self._progress, quiet_s) for pool in sorted(guests)}
        self._sharing = [
            GpuTimeSharing(
                pool,
                engines if pool == "rollout" else lambda: {TRAINER: trainer},
                guests[pool],
                lock,
                sleep_timeout_s=config.timeouts.request_s,
                held=True,
                turn="a scoring phase" if guests[pool] is teachers else "a turn of the trainer",
            )
            for pool, lock in self.locks.items()
        ]
        self._turns = trainer if config.rollout.host is not None else None
        self._engines, self._trainer = self.locks.get("rollout"), self.locks.get("train")
        self._refreshing = asyncio.Lock()
        self.rebuild: AbstractAsyncContextManager[None] = nullcontext()
        """Held while engines are rebuilt, several at a time."""
        if self._engines is not None:
            self.rebuild = SharedLock(self._engines, "a rebuild of a student's replica")

    async def acquire(self) -> None:
        """Takes all locks for an earlier rollout stage, which may have died in a turn."""
        for lock in self.locks.values():
            await lock.acquire("an earlier rollout stage")

    async def run(self) -> None:
        """Alternates hosts and guests until cancelled; returns if no GPUs are shared."""
        async with asyncio.TaskGroup() as group:
            for each in self._sharing:
                group.create_task(each.endless())

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[None]:
        """Held while the trainer copies its weights out; it takes a turn on shared GPUs for that.

        The turn is waited for without a lock of the GPUs or of the weight sync: a replica that is
        rebuilt has both until it has the newest weights. In the turn none is rebuilt, and
        ``refresh`` cannot have the sync's lock. So the snapshot gets it at once, and never waits
        with it for another turn, which a rebuild could keep from it.
        """
        async with self._refreshing:
            if self._turns is not None:
                turn = self._turns.begin_turn("rollout")
                await self._watchdog.within(
                    "waiting for its GPUs", turn, self._progress, sys.maxsize
                )
            async with holding("a snapshot", self._trainer):
                yield

    def push(self) -> AbstractAsyncContextManager[None]:
        """Held during a weight sync: a host that sleeps takes no weights."""
        return holding("a weight sync", self._engines, self._trainer)

    def join(self) -> AbstractAsyncContextManager[None]:
        """Held while a rebuilt engine gets the newest weights, inside of ``rebuild``."""
        return holding("a replica that joins", self._trainer)

    @asynccontextmanager
    async def refresh(self) -> AsyncIterator[None]:
        """Held while an evaluation's replicas get the newest weights."""
        async with self._refreshing, holding("an evaluation", self._trainer):
            yield
