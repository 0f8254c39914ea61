"""Teachers that are the student take its weights when they are due, before the students do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from async_opd.core.errors import StageError
from async_opd.core.refresh import RefreshingSync
from async_opd.core.stages import SyncReport


class World:
    """Writes down what happens, in order."""

    def __init__(self, directory: Path) -> None:
        self.seen: list[str] = []
        self.directory = directory
        self.version = 0
        self.fail = False

    async def snapshot(self, version: int) -> None:
        self.version = version
        self.seen.append(f"snapshot {version}")

    async def push(self) -> SyncReport:
        self.seen.append(f"students {self.version}")
        return SyncReport(self.version, 8, {"sync/seconds": 1.0})

    async def save(self, directory: str) -> None:
        os.makedirs(directory)
        self.seen.append(f"copy {Path(directory).name}")

    async def load(self, teacher: str, version: int, directory: str) -> None:
        if self.fail:
            raise StageError(teacher, "no replica took the weights")
        assert Path(directory).name in self.copies
        self.seen.append(f"{teacher} {version} {Path(directory).name}")

    def sync(self, **every: int) -> RefreshingSync:
        return RefreshingSync(self, every, self.save, self.load, self.directory)

    @property
    def copies(self) -> list[str]:
        return sorted(copy.name for copy in self.directory.glob("*"))


async def pushed(sync: RefreshingSync, versions: int) -> None:
    for version in range(1, versions + 1):
        await sync.snapshot(version)
        await sync.push()


async def test_a_teacher_takes_every_so_manieth_version_before_the_students(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await pushed(world.sync(a=2), 3)
    assert world.seen == [
        *("snapshot 1", "students 1"),
        *("snapshot 2", "copy version_2", "a 2 version_2", "students 2"),
        *("snapshot 3", "students 3"),
    ]


async def test_only_copies_that_a_teacher_has_stay(tmp_path: Path) -> None:
    world = World(tmp_path)
    await pushed(world.sync(a=2, b=5), 7)
    assert world.copies == ["version_5", "version_6"]


async def test_the_report_says_how_long_it_took(tmp_path: Path) -> None:
    sync = World(tmp_path).sync(a=1)
    await sync.snapshot(1)
    assert set((await sync.push()).metrics) == {"sync/seconds", "sync/teachers_s"}


async def test_a_teacher_that_does_not_take_it_ends_the_push(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.fail = True
    sync = world.sync(a=1)
    await sync.snapshot(1)
    with pytest.raises(StageError, match="no replica took"):
        await sync.push()


async def test_after_a_restart_a_teacher_that_was_refreshed_before_takes_the_first_version(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    sync = world.sync(a=3, b=9)
    for version in (7, 8):
        await sync.snapshot(version)
        await sync.push()
    loads = [seen for seen in world.seen if seen.startswith(("a ", "b "))]
    assert loads == ["a 7 version_7"]
