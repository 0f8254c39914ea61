"""Rows of files behind URLs, through fsspec's memory and local file systems."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from async_opd.config.load import load_config
from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import ConfigError, SourceError
from async_opd.core.row import Row
from async_opd.data.files import FileSource
from async_opd.data.streamed_rows import StreamedRows

pytestmark = pytest.mark.usefixtures("empty_store")

FIELDS = [{"prompt": f"p{at}", "answer": str(at), "data_source": "a"} for at in range(7)]


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://data" if request.param == "memory" else f"file://{tmp_path}"


def jsonl(folder: str) -> str:
    url = f"{folder}/train.jsonl"
    with fsspec.open(url, "w") as file:
        file.write("".join(json.dumps(fields) + "\n" for fields in FIELDS))
    return url


def parquet(folder: str) -> str:
    url = f"{folder}/train.parquet"
    with fsspec.open(url, "wb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(FIELDS), file, row_group_size=3)
    return url


def prompts(url: str, start: int = 0) -> list[str]:
    found = FileSource(path=url).rows(0, DataConfig(train=[]), start)
    return [str(row.prompt) for row in found if isinstance(row, Row)]


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("start", [0, 4, 7])
def test_rows_behind_a_url_are_those_from_any_place(folder: str, write: object, start: int) -> None:
    url = jsonl(folder) if write is jsonl else parquet(folder)
    assert prompts(url, start) == [f"p{at}" for at in range(start, 7)]


def test_a_file_behind_a_url_is_streamed(folder: str) -> None:
    source = FileSource(path=parquet(folder), stream=True, window=2)
    rows = StreamedRows(lambda start: source.rows(0, DataConfig(train=[]), start), 2)
    taken = [rows.taken(at, None) for at in (0, 5, 8)]
    assert [(row.uid, epoch) for row, epoch in taken if isinstance(row, Row)] == [
        ("0:0", 0),
        ("0:5", 0),
        ("0:1", 1),
    ]


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("memory://data/none.jsonl", "does not exist"),
        ("memory://data/folder", "neither [*].jsonl nor [*].parquet"),
        ("nowhere://data/train.jsonl", "cannot be read: .*Protocol not known: nowhere"),
        ("memory://data/broken.parquet", "is not valid parquet: it does not end"),
    ],
)
def test_a_url_without_rows_is_refused_with_its_cause(url: str, cause: str) -> None:
    with fsspec.open("memory://data/broken.parquet", "w") as file:
        file.write("no parquet")
    with pytest.raises(SourceError, match=cause):
        prompts(url)


def test_without_fsspec_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SourceError, match=r"pip install 'async-opd\[storage\]'"):
        prompts("memory://data/train.jsonl")


def config(path: str) -> str:
    return f"student: {{model: m}}\nteachers: {{t: {{model: m}}}}\ndata: {{train: '{path}'}}\n"


def test_a_url_in_a_config_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", "mine")
    (tmp_path / "c.yaml").write_text(config("s3://${BUCKET}/train.jsonl"))
    assert load_config(tmp_path / "c.yaml").data.train[0].label == "s3://mine/train.jsonl"
    (tmp_path / "c.yaml").write_text(config("s3://AKEY:s3cr3t-of-mine@mine/train.jsonl"))
    with pytest.raises(ConfigError, match="holds a secret") as caught:
        load_config(tmp_path / "c.yaml")
    assert "s3cr3t-of-mine" not in str(caught.value)
