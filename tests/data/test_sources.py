"""Rows that cannot be read say which file and row they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.data.files import FileSource
from async_opd.data.reasoning_gym import ReasoningGymSource
from async_opd.data.stored_rows import StoredRows, read_source
from async_opd.data.user import UserSource
from async_opd.grading.graders import load_grader
from tests.data.pictures import RED

ROW = '{"prompt": "a", "data_source": "s"}\n'


def read(path: Path, **data: Any) -> StoredRows:
    return read_source(FileSource(path=str(path)), 0, DataConfig(train=[], **data))


@pytest.mark.parametrize(
    ("content", "cause", "row"),
    [
        (f'{ROW}\n\n{{"data_source": "s"}}\n', "no field 'prompt'", 4),
        (b"\xff\xfe", "is UTF-16, not UTF-8", None),
        (None, "cannot be read", None),
        ('{"prompt": 5, "data_source": "s"}\n', "'prompt' is int, neither text nor chat", 1),
    ],
    ids=["blank lines count", "not UTF-8", "a directory", "a number"],
)
def test_what_cannot_be_read_is_named_with_its_row(
    tmp_path: Path, content: str | bytes | None, cause: str, row: int | None
) -> None:
    path = tmp_path / "a.jsonl"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SourceError, match=cause) as caught:
        read(path)
    assert row is None or caught.value.row == row


def test_a_datasets_directory_is_read_and_one_with_splits_asks_for_one(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"question": "q", "domain": "math", "answer": 4}])
    rows.save_to_disk(str(tmp_path / "rows"))
    (found,) = read(tmp_path / "rows", prompt="question", route_by="domain")
    assert (found.prompt, found.data_source, found.answer) == ("q", "math", "4")
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(SourceError, match="splits/train"):
        read(tmp_path / "splits")


def rows_of_user() -> list[dict[str, Any]]:
    return [{"prompt": "<image>", "data_source": "s", "images": RED}]


def test_a_users_function_gives_rows_with_encoded_images() -> None:
    source = UserSource(kind="user", function=f"{__name__}:rows_of_user")
    (row,) = read_source(source, 0, DataConfig(train=[]))
    assert list(row.encoded.values()) == [RED]


def test_reasoning_gym_makes_rows_that_its_own_verifier_grades() -> None:
    source = ReasoningGymSource(kind="reasoning_gym", task="basic_arithmetic", size=3, seed=1)
    row = read_source(source, 0, DataConfig(train=[]))[1]
    assert load_grader("exact")(str(row.answer), row) == 1.0
    with pytest.raises(SourceError, match="no_such_task"):
        read_source(source.model_copy(update={"task": "no_such_task"}), 0, DataConfig(train=[]))
