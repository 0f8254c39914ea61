"""Lines that are appended as a whole, and files whose last line is torn."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.files.lines import CHUNK, append_line, end_torn_line, whole_lines


class Disk(io.FileIO):
    """Takes so many bytes, a few at a time: then it is full."""

    def __init__(self, path: Path, room: int, at_once: int = 3) -> None:
        super().__init__(path, "a+")
        self.room, self.at_once = room, at_once

    def write(self, data: object) -> int:
        part = memoryview(data)[: min(self.at_once, self.room)]  # type: ignore[arg-type]
        if not part:
            raise OSError(28, "No space left on device")
        self.room -= len(part)
        return super().write(part)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def test_a_line_that_is_written_in_parts_is_there_as_a_whole(file: Path) -> None:
    with Disk(file, 100) as disk:
        append_line(disk, b"0123456789\n")
        append_line(disk, b"abc\n")
    assert file.read_bytes() == b"0123456789\nabc\n"


def test_a_line_for_which_there_is_no_room_leaves_the_file_as_it_was(file: Path) -> None:
    with Disk(file, 15) as disk:
        append_line(disk, b"0123456789\n")
        with pytest.raises(OSError, match="No space left"):
            append_line(disk, b"abcdef\n")
    assert file.read_bytes() == b"0123456789\n"


def test_a_disk_that_takes_nothing_without_an_error_is_an_error(file: Path) -> None:
    class Deaf(io.FileIO):
        def write(self, data: object) -> int:
            return 0

    with Deaf(file, "a+") as disk, pytest.raises(OSError, match="4 of 4 bytes"):
        append_line(disk, b"abc\n")


@pytest.mark.parametrize("before", [b"", b"whole\n", b"whole\nto"])
def test_what_follows_a_torn_line_has_a_line_of_its_own(file: Path, before: bytes) -> None:
    file.write_bytes(before)
    end_torn_line(file)
    with file.open("ab") as opened:
        opened.write(b"next\n")
    assert file.read_bytes().splitlines()[-1] == b"next"
    assert file.read_bytes().startswith(before)


def test_a_file_that_is_not_there_has_no_lines(file: Path) -> None:
    assert whole_lines(file) == 0


@given(
    st.lists(st.sampled_from([b"\n", b"a", b"bc", b"x" * (CHUNK - 1), b"y" * CHUNK]), max_size=8),
    st.none() | st.integers(0, 3 * CHUNK),
)
def test_whole_lines_end_with_the_last_newline(parts: list[bytes], most: int | None) -> None:
    content = b"".join(parts)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "f"
        path.write_bytes(content)
        assert whole_lines(path, most) == content[:most].rfind(b"\n") + 1
