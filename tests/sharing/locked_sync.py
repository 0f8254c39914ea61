"""A weight sync under the locks that ``SharedGpus`` takes for it."""

from __future__ import annotations

from typing import Any

from async_opd.sharing.time_sharing import GpuLock, holding


class LockedSync:
    """Holds the trainer's lock in a snapshot, and both in a push."""

    def __init__(self, inner: Any, *, replicas: GpuLock | None, trainer: GpuLock | None) -> None:
        self._inner, self._replicas, self._trainer = inner, replicas, trainer

    async def snapshot(self, version: int, again: bool = False) -> None:
        async with holding("a snapshot", self._trainer):
            await self._inner.snapshot(version, again)

    async def push(self) -> Any:
        async with holding("a weight sync", self._replicas, self._trainer):
            return await self._inner.push()
