"""A stranger's folder as a ``file://`` URL: only regular files are opened, no link is followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_opd.checkpoint.run_copies import END, LISTING, WRITER, RunCopies
from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.data.files import FileSource
from async_opd.data.stored_rows import read_source
from async_opd.files.remote import Changed, RemoteFile
from tests.fuzz.command import bounded, command
from tests.security.hostile_data import GOOD, lines

Make = Callable[[Path], object]
KINDS: dict[str, Make] = {
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to(path.parent.parent / "private"),
    "folder": Path.mkdir,
}
PRIVATE = b"{}"


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Puts another thing than a regular file at a place; the file is below ``tmp_path``."""
    (tmp_path / "private").write_bytes(PRIVATE)
    kind: Make = KINDS[request.param]
    return kind


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def at(path: Path) -> RemoteFile:
    """A file of a mirror: its place in the folder that somebody has named."""
    return RemoteFile(f"file://{path.parent}") / path.name


USES: dict[str, Callable[[RemoteFile], object]] = {
    "read": lambda file: file.read(100),
    "open": lambda file: file.open(encoding="utf-8"),
    "write": lambda file: file.write(b"new"),
}


@pytest.mark.parametrize("use", USES)
def test_only_regular_files_are_opened(bucket: Path, make: Make, use: str) -> None:
    make(bucket / "it")
    with bounded(), pytest.raises(OSError, match=r"symbolic link|not a regular file|directory"):
        USES[use](at(bucket / "it"))
    assert (bucket.parent / "private").read_bytes() == PRIVATE


def test_a_file_may_have_as_many_bytes_as_are_read(bucket: Path) -> None:
    (bucket / "it").write_bytes(b"12345")
    assert at(bucket / "it").read(5) == b"12345"
    with pytest.raises(Changed, match="more than 4 bytes"):
        at(bucket / "it").read(4)


def test_a_device_is_not_read() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        at(Path("/dev/zero")).read(100)


def test_nothing_is_read_below_a_folder_that_is_a_link(bucket: Path) -> None:
    (bucket.parent / "home").mkdir()
    (bucket.parent / "home" / "key.json").write_bytes(PRIVATE)
    (bucket / "step_1").symlink_to(bucket.parent / "home")
    with pytest.raises(OSError, match="symbolic link"):
        (RemoteFile(f"file://{bucket}") / "step_1" / "key.json").read(100)


@pytest.mark.parametrize("place", [f"{END}/{LISTING}", f"step_2/{LISTING}", "roll_backs_1.json"])
def test_a_mirror_with_a_pipe_for_a_listing_is_refused(bucket: Path, place: str) -> None:
    (bucket / place).parent.mkdir(exist_ok=True)
    os.mkfifo(bucket / place)
    said = command("inspect", f"file://{bucket}")
    assert said.code in (1, 2)
    assert "not a regular file" in said.err


def test_a_mirror_is_not_claimed_through_a_link_or_a_pipe(bucket: Path, make: Make) -> None:
    make(bucket / WRITER)
    with bounded(), pytest.raises(OSError, match=WRITER):
        RunCopies.at(f"file://{bucket}").claim("me")
    assert (bucket.parent / "private").read_bytes() == PRIVATE


def read(source: Any) -> list[str]:
    return [row.prompt for row in read_source(source, 0, DataConfig(train=[]))]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_at_a_url_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with bounded(), pytest.raises(SourceError, match="not a regular file"):
        read(FileSource(path=f"file://{tmp_path}/{name}"))


def test_a_file_that_a_url_names_itself_may_be_a_link(tmp_path: Path) -> None:
    lines(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "link.jsonl").symlink_to("rows.jsonl")
    assert read(FileSource(path=f"file://{tmp_path}/link.jsonl")) == [GOOD["prompt"]]


def test_a_folder_that_a_url_names_itself_may_be_a_link(bucket: Path) -> None:
    (bucket.parent / "link").symlink_to(bucket)
    (RemoteFile(f"file://{bucket.parent}/link") / "new" / "a").write(b"1")
    assert (RemoteFile(f"file://{bucket.parent}/link") / "new" / "a").read(9) == b"1"


def test_nothing_is_written_or_removed_below_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    theirs = tmp_path / "theirs"
    (theirs / "files.json").mkdir(parents=True)
    (theirs / "a.json").write_bytes(PRIVATE)
    (tmp_path / "bucket" / "step_1").symlink_to(theirs)
    step = RemoteFile(f"file://{tmp_path}/bucket") / "step_1"
    for use in ((step / "files.json").remove, lambda: (step / "b/a.json").write(b"x")):
        with pytest.raises(OSError, match="symbolic"):
            use()
    assert sorted(path.name for path in theirs.iterdir()) == ["a.json", "files.json"]


def test_a_link_in_the_place_of_a_copy_is_removed_without_its_target(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "bucket" / "step_1").symlink_to(tmp_path / "theirs")
    (RemoteFile(f"file://{tmp_path}/bucket") / "step_1").remove()
    assert not (tmp_path / "bucket" / "step_1").is_symlink()
    assert (tmp_path / "theirs").is_dir()
