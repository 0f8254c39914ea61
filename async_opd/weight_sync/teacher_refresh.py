"""Teachers that are the student itself take its weights every few versions.

    snapshot(v) ──► inner snapshot, a copy in ``<directory>/version_<v>`` where some are due
    push        ──► those load the copy ──► inner push

Teachers come first: what the students sample with version v is scored by no older teacher than v
asks for. The newest copy of each teacher stays, for replicas that are rebuilt, and those that
belong to a checkpoint: a run that goes on from one has the teachers that it had then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from async_opd.core.stages import SyncReport, WeightSync
from async_opd.files.safe_open import remove_tree

Save = Callable[[str], Awaitable[None]]
Load = Callable[[str, int, str], Awaitable[None]]


@dataclass(frozen=True)
class WeightCopies:
    """Where copies are. ``initial`` is version 0, ``checkpoints()`` the versions of those kept."""

    directory: Path
    initial: Path
    checkpoints: Callable[[], Collection[int]]

    def of(self, version: int) -> Path:
        """The copy of a version."""
        return self.directory / f"version_{version}" if version else self.initial

    def tidy(self, used: Collection[Path]) -> None:
        """Removes all others."""
        for copy in self.directory.glob("version_*"):
            if copy not in used:
                remove_tree(copy)


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
        copies: WeightCopies,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._inner = inner
        self._every = dict(every)
        self._save = save
        self._load = load
        self._copies = copies
        self._notify = notify
        self._clock = clock
        self._due: dict[str, int] = {}
        self._has = dict.fromkeys(every, 0)

    async def snapshot(self, version: int, again: bool = False) -> None:
        """See WeightSync.snapshot."""
        await self._inner.snapshot(version, again)
        wanted = {name: version - version % every for name, every in self._every.items()}
        self._due = {name: its for name, its in wanted.items() if its != self._has[name]}
        for its in sorted(set(self._due.values())):
            await self._copied(its, again)

    async def _copied(self, version: int, again: bool) -> None:
        """There is a copy of the version; of one that is gone the checkpoint's weights."""
        copy = self._copies.of(version)
        if again and copy.is_dir():
            return
        if again:
            self._notify(f"{copy} is gone: its teachers take the checkpoint's weights")
        await self._save(str(copy))

    async def push(self) -> SyncReport:
        """See WeightSync.push."""
        if not self._due:
            return await self._inner.push()
        started = self._clock()
        await asyncio.gather(
            *(
                self._load(name, version, str(self._copies.of(version)))
                for name, version in self._due.items()
            )
        )
        self._has |= self._due
        await asyncio.to_thread(self._copies.tidy, self._used())
        seconds = self._clock() - started
        report = await self._inner.push()
        return replace(report, metrics={**report.metrics, "sync/teachers_s": seconds})

    def _used(self) -> set[Path]:
        """What teachers would be rebuilt from, and what they had at each checkpoint."""
        kept = self._copies.checkpoints()
        then = (version - version % every for version in kept for every in self._every.values())
        return {self._copies.of(version) for version in (*self._has.values(), *then)}
