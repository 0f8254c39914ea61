"""Rows that cannot be read say which file and row they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.data.files import FileSource
from async_opd.data.stored_rows import StoredRows, read_source

ROW = '{"prompt": "a", "data_source": "s"}\n'


def read(path: Path, content: bytes) -> StoredRows:
    path.write_bytes(content)
    return read_source(FileSource(path=str(path)), 0, DataConfig(train=[]))


def test_a_row_without_a_prompt_counts_blank_lines_before_it(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        read(tmp_path / "a.jsonl", f'{ROW}\n\n{{"data_source": "s"}}\n'.encode())
    assert caught.value.row == 4


def test_a_file_that_is_not_utf_8_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is UTF-16, not UTF-8"):
        read(tmp_path / "a.jsonl", b"\xff\xfe")


def test_a_directory_named_like_a_file_is_a_source_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(SourceError, match="cannot be read"):
        read_source(FileSource(path=str(tmp_path / "a.jsonl")), 0, DataConfig(train=[]))


def test_a_prompt_that_is_a_number_is_refused_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="'prompt' is int, neither text nor chat") as caught:
        read(tmp_path / "a.jsonl", b'{"prompt": 5, "data_source": "s"}\n')
    assert caught.value.row == 1
