"""Teachers that are the student itself take its weights every few versions.

    snapshot(v) ──► inner snapshot, a copy in ``<directory>/version_<v>`` where some are due
    push        ──► those load the copy ──► inner push

Teachers come first: what the students sample with version v is scored by no older teacher than v
asks for. The newest copy stays, for replicas that are rebuilt. A resumed run begins with a version
that is not the first: its teachers take that one if they had been refreshed before.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from async_opd.core.stages import SyncReport, WeightSync

Save = Callable[[str], Awaitable[None]]
Load = Callable[[str, int, str], Awaitable[None]]


class RefreshingSync:
    """Implements ``async_opd.core.stages.WeightSync`` around another one.

    ``every[teacher]`` are versions between two refreshes; ``save(directory)`` writes the trainer's
    weights, ``load(teacher, version, directory)`` gives them to a teacher.
    """

    def __init__(
        self,
        inner: WeightSync,
        every: Mapping[str, int],
        save: Save,
        load: Load,
        directory: Path,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._inner = inner
        self._every = dict(every)
        self._save = save
        self._load = load
        self._directory = directory
        self._clock = clock
        self._due: list[str] = []
        self._copies: dict[str, Path] = {}  # the newest that each teacher has taken
        self._copy = directory
        self._version: int | None = None

    async def snapshot(self, version: int) -> None:
        """See WeightSync.snapshot."""
        await self._inner.snapshot(version)
        self._due = [
            name
            for name, every in self._every.items()
            if version % every == 0 or (self._version is None and version >= every)
        ]
        self._version, self._copy = version, self._directory / f"version_{version}"
        if self._due:
            await self._save(str(self._copy))

    async def push(self) -> SyncReport:
        """See WeightSync.push."""
        if not self._due:
            return await self._inner.push()
        started, version, copy = self._clock(), self._version or 0, self._copy
        await asyncio.gather(*(self._load(name, version, str(copy)) for name in self._due))
        self._copies |= dict.fromkeys(self._due, copy)
        await asyncio.to_thread(self._tidy)
        seconds = self._clock() - started
        report = await self._inner.push()
        return replace(report, metrics={**report.metrics, "sync/teachers_s": seconds})

    def _tidy(self) -> None:
        """Removes copies that no teacher would be rebuilt from."""
        for copy in self._directory.glob("version_*"):
            if copy not in self._copies.values():
                shutil.rmtree(copy, ignore_errors=True)
