"""Data files: whatever is in them, the command works or names the file and the problem."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.command import ROW, Said, checked, good, written
from tests.fuzz.conftest import examples

pytestmark = pytest.mark.slow

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(["prompt", "data_source", "answer", "other"])
COLUMNS = st.sampled_from(
    [
        arrow.array([None]),
        arrow.array([1.5]),
        arrow.array([b"\xff\xfe"]),
        arrow.array(["sort 1="]),
        arrow.array([["a", None]]),
        arrow.array([[{"role": "user", "content": "1="}]]),
        arrow.array([{"a": 1}]),
        arrow.array([10**18], arrow.timestamp("ns")),
        arrow.array(["sort"]).dictionary_encode(),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def read(folder: Path, name: str, content: bytes) -> Said:
    """``check`` of a config that trains on this file."""
    (folder / name).write_bytes(content)
    config = good(folder)
    config["data"] = {"train": [name]}
    said = checked(written(folder, config))
    if said.code == 2:
        assert name in said.err or "teachers" in said.err, said.err
    return said


def test_the_row_that_is_mutated_here_is_good(folder: Path) -> None:
    assert read(folder, "a.jsonl", ROW.encode()).code == 0


@examples(50)
@given(content=st.binary(max_size=100))
def test_jsonl_of_bytes(folder: Path, content: bytes) -> None:
    read(folder, "a.jsonl", content)


@examples(60)
@given(row=st.dictionaries(FIELDS, JSON, max_size=4), ascii_only=st.booleans())
def test_jsonl_of_any_objects(folder: Path, row: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(row, ensure_ascii=ascii_only)
    read(folder, "a.jsonl", ROW.encode() + text.encode(errors="surrogatepass"))


@examples(60)
@given(at=st.integers(0, len(ROW)), length=st.integers(0, 5), new=st.binary(max_size=6))
def test_jsonl_of_a_good_row_with_other_bytes(
    folder: Path, at: int, length: int, new: bytes
) -> None:
    row = ROW.encode()
    read(folder, "a.jsonl", row[:at] + new + row[at + length :])


@examples(30)
@given(prompt=JSON | st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=3))
def test_jsonl_of_any_prompt(folder: Path, prompt: Any) -> None:
    row = {"prompt": prompt, "data_source": "sort", "answer": "1"}
    read(folder, "a.jsonl", json.dumps(row).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"\xef\xbb\xbf" + ROW.encode(),
        ROW.encode("utf-16"),
        ROW.encode() + b"\x00" * 100,
        b'{"prompt": "\\ud800", "data_source": "sort", "answer": "1"}',
        b'{"prompt": "1=", "data_source": "\\ud800", "answer": "1"}',
        b"[" * 100_000,
        b'{"prompt": 1e999, "data_source": "sort"}',
        b'{"x": ' + b"9" * 5000 + b"}",
        b'{"prompt": "' + b"1" * 2_000_000 + b'", "data_source": "sort", "answer": "1"}',
    ],
    ids=[
        "empty",
        "blank lines",
        "byte order mark",
        "utf-16",
        "zeros",
        "lone surrogate",
        "lone surrogate as data source",
        "too deep",
        "infinite",
        "digits",
        "long",
    ],
)
def test_jsonl_that_is_known_to_be_hard(folder: Path, content: bytes) -> None:
    read(folder, "a.jsonl", content)


def table(folder: Path) -> bytes:
    """A good parquet file."""
    columns = {"prompt": ["sort 210="] * 3, "data_source": ["sort"] * 3, "answer": ["012"] * 3}
    parquet.write_table(arrow.table(columns), folder / "good.parquet")
    return (folder / "good.parquet").read_bytes()


@examples(50)
@given(
    keep=st.floats(0, 1),
    at=st.floats(0, 1),
    new=st.binary(max_size=8),
)
def test_parquet_with_other_bytes(folder: Path, keep: float, at: float, new: bytes) -> None:
    content = table(folder)
    start = int(at * len(content))
    changed = content[:start] + new + content[start + len(new) :]
    cut = int(keep * len(changed)) if keep < 0.5 else len(changed)
    read(folder, "a.parquet", changed[:cut])


@examples(40)
@given(columns=st.dictionaries(FIELDS, COLUMNS, max_size=4))
def test_parquet_of_any_columns(folder: Path, columns: dict[str, Any]) -> None:
    parquet.write_table(arrow.table(columns), folder / "made.parquet")
    read(folder, "a.parquet", (folder / "made.parquet").read_bytes())


@examples(20)
@given(
    files=st.dictionaries(
        st.sampled_from(
            ["state.json", "dataset_info.json", "data-00000-of-00001.arrow", "dataset_dict.json"]
        ),
        st.binary(max_size=30)
        | JSON.map(json.dumps).map(str.encode)
        | st.just(b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'),
    )
)
def test_directories_of_datasets(folder: Path, files: dict[str, bytes]) -> None:
    pytest.importorskip("datasets")
    place = folder / "rows"
    place.mkdir(exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    for name, content in files.items():
        (place / name).write_bytes(content)
    config = good(folder)
    config["data"] = {"train": ["rows"]}
    assert checked(written(folder, config)).code == 2


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a", "a.jsonl/", "\x00.jsonl", "a" * 300])
def test_files_of_other_kinds(folder: Path, name: str) -> None:
    config = good(folder)
    config["data"] = {"train": [name]}
    assert checked(written(folder, config)).code == 2


def test_a_pipe_that_nobody_writes_to_is_no_data(folder: Path) -> None:
    if not (folder / "pipe.jsonl").exists():
        os.mkfifo(folder / "pipe.jsonl")
    config = good(folder)
    config["data"] = {"train": ["pipe.jsonl"]}
    assert "is not a file" in checked(written(folder, config)).err
