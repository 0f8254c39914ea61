"""Refreshes teachers that are the student itself with its weights every few versions.

    snapshot(v) ──► a copy in ``<directory>/version_<v>`` if a teacher needs it
    push        ──► these teachers load the copy ──► broadcast to the students

Teachers load before the students: a rollout of version v is scored by the teacher that version v
asks for, or a newer one. Two kinds of copies are kept: the newest of each teacher, for replicas
that are rebuilt, and those of checkpoints: a run that resumes has the teachers that it had then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_opd.files.safe_open import make_folder, refuse_link, remove_tree
from async_opd.waiting.deadline import gather_or_cancel

Save = Callable[[str], Awaitable[None]]
Load = Callable[[str, int, str], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class WeightCopies:
    """The folders of the copies. ``initial`` is version 0.

    ``checkpoints()`` are the weight versions of the checkpoints that are kept.
    """

    directory: Path
    initial: Path
    checkpoints: Callable[[], Collection[int]]

    def of(self, version: int) -> Path:
        """The folder of a version."""
        return self.directory / f"version_{version}" if version else self.initial

    def tidy(self, used: Collection[Path]) -> None:
        """Removes all copies but the used ones. OSError if their folder is a link."""
        refuse_link(self.directory)
        for copy in self.directory.glob("version_*"):
            if copy not in used:
                remove_tree(copy)


class TeacherRefresh:
    """Before and after a weight sync: which teachers are due, their copies, and their load.

    ``every[teacher]`` are versions between two refreshes; ``save(directory)`` writes the trainer's
    weights, ``load(teacher, version, directory)`` gives them to a teacher.
    """

    def __init__(
        self,
        every: Mapping[str, int],
        save: Save,
        load: Load,
        copies: WeightCopies,
        notify: Callable[[str], None],
    ) -> None:
        self._every = dict(every)
        self._save = save
        self._load = load
        self._copies = copies
        self._notify = notify
        self._due: dict[str, int] = {}
        self._has = dict.fromkeys(every, 0)

    async def copy(self, version: int, again: bool) -> None:
        """After a snapshot: writes the copies that teachers need for this version."""
        wanted = {name: version - version % every for name, every in self._every.items()}
        self._due = {name: its for name, its in wanted.items() if its != self._has[name]}
        for its in sorted(set(self._due.values())):
            await self._copied(its, again)

    async def _copied(self, version: int, again: bool) -> None:
        """Writes a copy of the version.

        A resumed run keeps a copy that is there, and else writes the checkpoint's weights.
        """
        copy = self._copies.of(version)
        if again and copy.is_dir():
            return
        if again:
            self._notify(f"{copy} does not exist: its teachers load the checkpoint's weights")
        make_folder(copy.parent)  # raises if it is a link
        await self._save(str(copy))

    async def load(self) -> dict[str, float]:
        """Before a push: the teachers that are due load their copies. Metrics of the sync.

        The copies that they had stay until the next load: a trainer that is lost before the push
        ends may go on from the version before.
        """
        if not self._due:
            return {}
        started = time.perf_counter()
        await gather_or_cancel(
            *(
                self._load(name, version, str(self._copies.of(version)))
                for name, version in self._due.items()
            )
        )
        had = {self._copies.of(version) for version in self._has.values()}
        self._has |= self._due
        await asyncio.to_thread(self._copies.tidy, self._used() | had)
        return {"sync/teachers_s": time.perf_counter() - started}

    def _used(self) -> set[Path]:
        """The copies that the teachers have now, and those that they had at each checkpoint."""
        kept = self._copies.checkpoints()
        then = (version - version % every for version in kept for every in self._every.values())
        return {self._copies.of(version) for version in (*self._has.values(), *then)}
