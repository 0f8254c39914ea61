"""Teachers that are the student take its weights when they are due, before the students do."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import StageError
from async_opd.weight_sync.teacher_refresh import TeacherRefresh, WeightCopies


class World:
    """A weight sync that writes down what happens, in order."""

    def __init__(self, directory: Path, *checkpoints: int) -> None:
        self.checkpoints = checkpoints
        self.notes: list[str] = []
        self.seen: list[str] = []
        self.directory = directory
        self.version = 0
        self.has: dict[str, int] = {}  # teacher -> the version that it loaded last
        self.fail = False

    async def snapshot(self, version: int, again: bool = False) -> None:
        self.version = version
        self.seen.append(f"snapshot {version}")
        await self.refresh.copy(version, again)

    async def push(self) -> dict[str, float]:
        metrics = await self.refresh.load()
        self.seen.append(f"students {self.version}")
        return metrics

    async def save(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.seen.append(f"copy {Path(directory).name}")

    async def load(self, teacher: str, version: int, directory: str) -> None:
        if self.fail:
            raise StageError(teacher, "no replica took the weights")
        assert Path(directory).name in (*self.copies, "student")
        self.has[teacher] = version
        self.seen.append(f"{teacher} {version} {Path(directory).name}")

    def sync(self, **every: int) -> World:
        """Itself, as a run begins it: teachers have their first weights."""
        copies = WeightCopies(self.directory, self.directory / "student", lambda: self.checkpoints)
        self.refresh = TeacherRefresh(every, self.save, self.load, copies, self.notes.append)
        return self

    def loads(self) -> list[str]:
        """Which teacher took which weights since this was last asked."""
        found = [seen for seen in self.seen if seen.startswith(("a ", "b "))]
        self.seen.clear()
        return found

    @property
    def copies(self) -> list[str]:
        return sorted(copy.name for copy in self.directory.glob("*"))


async def pushed(sync: World, versions: int) -> None:
    for version in range(1, versions + 1):
        await sync.snapshot(version)
        await sync.push()


async def test_a_teacher_takes_every_nth_version_before_students(tmp_path: Path) -> None:
    world = World(tmp_path)
    await pushed(world.sync(a=2), 3)
    assert world.seen == [
        *("snapshot 1", "students 1"),
        *("snapshot 2", "copy version_2", "a 2 version_2", "students 2"),
        *("snapshot 3", "students 3"),
    ]


async def test_only_copies_of_a_teacher_since_its_last_load_or_of_a_checkpoint_stay(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await pushed(world.sync(a=2, b=5), 7)
    assert world.copies == ["version_4", "version_5", "version_6"]
    world = World(tmp_path, 4, 5)
    await pushed(world.sync(a=2), 7)
    assert world.copies == ["version_4", "version_6"]


async def test_a_push_reports_its_time_or_the_failed_teacher(tmp_path: Path) -> None:
    sync = World(tmp_path).sync(a=1)
    await sync.snapshot(1)
    assert set(await sync.push()) == {"sync/teachers_s"}
    world = World(tmp_path)
    world.fail = True
    sync = world.sync(a=1)
    await sync.snapshot(1)
    with pytest.raises(StageError, match="no replica took"):
        await sync.push()


async def again(sync: World, version: int) -> None:
    """The run goes on from a checkpoint of this version."""
    await sync.snapshot(version, again=True)
    await sync.push()


async def test_a_resumed_teacher_takes_the_checkpoints_weights(tmp_path: Path) -> None:
    world = World(tmp_path, 5)
    await pushed(world.sync(a=3, b=9), 8)
    world.loads()
    await again(world.sync(a=3, b=9), 5)
    assert world.loads() == ["a 3 version_3"]


@pytest.mark.parametrize(
    ("version", "loads"), [(5, ["a 3 version_3"]), (2, ["a 0 student"]), (7, [])]
)
async def test_teachers_go_back_with_it(tmp_path: Path, version: int, loads: list[str]) -> None:
    world = World(tmp_path, version)
    sync = world.sync(a=3)
    await pushed(sync, 8)
    world.loads()
    await again(sync, version)
    assert world.loads() == loads


async def test_a_copy_that_is_gone_is_replaced_by_the_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    await again(world.sync(a=3), 7)
    assert world.loads() == ["a 6 version_6"]
    assert world.notes == [
        f"{tmp_path}/version_6 does not exist: its teachers load the checkpoint's weights"
    ]


@pytest.mark.slow
@given(every=st.integers(1, 4), lives=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9))))
def test_after_any_restarts_a_teacher_has_what_an_undisturbed_run_gives_it(
    tmp_path_factory: pytest.TempPathFactory, every: int, lives: list[tuple[int, int]]
) -> None:
    """Each life makes some versions, checkpoints one of them, and is killed."""
    directory, at = tmp_path_factory.mktemp("copies"), 0
    made_in: dict[int, int] = {}  # version -> the life whose weights it has

    async def live(life: int, versions: int, checkpoint: int) -> int:
        world = World(directory, at, min(at + checkpoint, at + versions))
        sync = world.sync(a=every)
        if at:
            await again(sync, at)
        for version in range(at + 1, at + versions + 1):
            made_in[version] = life
            await sync.snapshot(version)
            if (directory / f"version_{version}").exists():
                (directory / f"version_{version}" / "life").write_text(str(life))
            await sync.push()
            has = world.has.get("a", 0)
            assert has == version - version % every
            copy = directory / f"version_{has}" / "life"
            assert has == 0 or copy.read_text() == str(made_in[has])
        assert world.notes == []
        return world.checkpoints[1]

    for life, (versions, checkpoint) in enumerate(lives):
        at = asyncio.run(live(life, versions, checkpoint))
