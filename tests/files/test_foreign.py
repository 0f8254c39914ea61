"""Files below a foreign directory: no link is followed there, and a read has a bound."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from async_opd.files.foreign import MAX_PARTS, ForeignPath, foreign

SECRET = "what is not the reader's to give"

Read = Callable[[ForeignPath], object]
READS: list[Read] = [
    lambda place: place.read(),
    lambda place: place.open().read(),
    lambda place: place.held().__enter__(),
    lambda place: place.as_path(),
]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a file, beside the foreign one."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "key").write_text(SECRET)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "foreign"
    (folder / "media" / "deep").mkdir(parents=True)
    (folder / "media" / "a.txt").write_text("a")
    (folder / "media" / "deep" / "b.txt").write_text("b")
    return folder


def test_a_regular_file_is_read(home: Path) -> None:
    place = ForeignPath(home) / "media/deep" / "b.txt"
    assert (place.read(), place.open().read(), place.within) == (b"b", "b", "media/deep/b.txt")
    with place.held() as name:
        assert Path(name).read_text() == "b"


def test_links_on_the_way_to_the_directory_are_its_users_own(home: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(home)
    assert (ForeignPath(tmp_path / "latest") / "media/a.txt").read() == b"a"
    assert [one.name for one in ForeignPath(tmp_path / "latest").entries()] == ["media"]


@pytest.mark.parametrize("read", READS)
def test_a_link_is_refused_as_a_file(home: Path, outside: Path, read: Read) -> None:
    (home / "media" / "c.txt").symlink_to(outside / "key")
    with pytest.raises(OSError, match="symbolic link, which a run does not follow"):
        read(ForeignPath(home) / "media/c.txt")


@pytest.mark.parametrize("read", [*READS, lambda place: place.exists()])
@pytest.mark.parametrize("name", ["assets/key", "media/assets/key"])
def test_a_link_is_refused_on_the_way(home: Path, outside: Path, read: Read, name: str) -> None:
    (home / name).parent.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic link"):
        read(ForeignPath(home) / name)


def test_a_folder_that_is_a_link_has_no_entries_to_give(home: Path, outside: Path) -> None:
    (home / "assets").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic link"):
        (ForeignPath(home) / "assets").entries()
    assert (ForeignPath(home) / "assets").exists()
    assert not (ForeignPath(home) / "assets").is_dir()


def test_a_walk_enters_folders_and_no_links(home: Path, outside: Path) -> None:
    (home / "media" / "assets").symlink_to(outside)
    walked = list(ForeignPath(home).walk())
    names = ["media/a.txt", "media/assets", "media/deep/b.txt"]
    assert [one.within for one in walked] == names
    assert [one.is_file() for one in walked] == [True, False, True]


@pytest.mark.parametrize(
    "name", ["../private/key", "media/../../private/key", "/etc/passwd", "", ".", "a//b", "a\0b"]
)
def test_a_name_that_leads_elsewhere_is_refused(home: Path, outside: Path, name: str) -> None:
    with pytest.raises(OSError, match="leads out of its directory"):
        ForeignPath(home) / name


def test_a_name_that_is_too_deep_is_refused(home: Path) -> None:
    place = ForeignPath(home) / "/".join("a" * MAX_PARTS)
    with pytest.raises(OSError, match="leads out"):
        place / "a"


def test_a_pipe_is_not_waited_for_and_a_folder_is_no_file(home: Path) -> None:
    os.mkfifo(home / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        (ForeignPath(home) / "pipe").read()
    with pytest.raises(IsADirectoryError):
        (ForeignPath(home) / "media").read()
    assert not (ForeignPath(home) / "pipe").is_file()


def test_more_bytes_than_a_reader_takes_are_refused(home: Path) -> None:
    place = ForeignPath(home) / "media" / "a.txt"
    assert place.read(1) == b"a"
    with pytest.raises(OSError, match="has more than 0 bytes") as caught:
        place.read(0)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(home / "media/a.txt"))


def test_what_is_not_there_is_an_error_of_its_kind(home: Path) -> None:
    place = ForeignPath(home) / "media" / "none"
    with pytest.raises(FileNotFoundError, match="media/none"):
        place.read()
    assert not place.exists()
    assert place.entries() == []
    assert not (ForeignPath(home) / "media/a.txt/x").exists()


def test_nothing_is_written(home: Path) -> None:
    for mode in ("w", "a", "r+"):
        with pytest.raises(OSError, match="is only read"):
            (ForeignPath(home) / "media/a.txt").open(mode)
    assert (home / "media" / "a.txt").read_text() == "a"


def test_a_link_is_removed_without_its_target(home: Path, outside: Path) -> None:
    (home / "media" / "link").symlink_to(outside / "key")
    for name in ("link", "link", "a.txt"):
        (ForeignPath(home) / "media" / name).remove()
    assert sorted(path.name for path in (home / "media").iterdir()) == ["deep"]
    assert (outside / "key").read_text() == SECRET


def test_nothing_is_removed_where_a_link_leads(home: Path, outside: Path) -> None:
    (home / "assets").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic link"):
        (ForeignPath(home) / "assets" / "key").remove()
    assert (outside / "key").exists()


def test_a_file_may_be_given_itself_unless_it_is_a_link(home: Path) -> None:
    (home / "link").symlink_to(home / "media" / "a.txt")
    assert foreign(home / "media" / "a.txt").read() == b"a"
    with pytest.raises(OSError, match="symbolic link"):
        foreign(home / "link").read()


def test_a_place_travels_between_processes(home: Path) -> None:
    place = ForeignPath(home) / "media" / "a.txt"
    assert pickle.loads(pickle.dumps(place)) == place


def data(home: Path, name: str) -> ForeignPath:
    return ForeignPath(home, own_links=True) / name


def test_links_within_a_directory_of_data_are_followed(home: Path) -> None:
    (home / "train.txt").symlink_to("media/a.txt")
    (home / "v1").symlink_to("media")
    assert data(home, "train.txt").read() == data(home, "v1/a.txt").read() == b"a"
    assert data(home, "train.txt").name == "train.txt"


@pytest.mark.parametrize("link", ["train.txt", "deep/train.txt"])
def test_links_out_of_a_directory_of_data_are_refused(home: Path, outside: Path, link: str) -> None:
    place = home / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(outside / "key")
    with pytest.raises(OSError, match="leads out of its directory"):
        data(home, link).read()


def test_links_to_hidden_files_are_refused(home: Path) -> None:
    (home / ".git").mkdir()
    (home / ".git" / "config").write_text(SECRET)
    (home / "train.txt").symlink_to(".git/config")
    with pytest.raises(OSError, match="leads out"):
        data(home, "train.txt").read()


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_the_hubs_cache_links_to_the_blobs_of_the_same_repository(
    tmp_path: Path, outside: Path, kind: str
) -> None:
    repository = tmp_path / "hub" / f"{kind}--me--one"
    snapshot = repository / "snapshots" / "c0ffee"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "1").write_text("a")
    snapshot.mkdir(parents=True)
    (snapshot / "a.txt").symlink_to("../../blobs/1")
    assert data(snapshot, "a.txt").read() == b"a"
    (repository / "blobs" / "1").unlink()
    (repository / "blobs" / "1").symlink_to(outside / "key")
    with pytest.raises(OSError, match="leads out"):
        data(snapshot, "a.txt").read()
