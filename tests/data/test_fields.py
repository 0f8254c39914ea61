"""Rows as other frameworks store them: fields inside of fields, answers inside of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.core.row import Row, answer_in, value_at
from async_opd.data.files import FileSource
from async_opd.data.prompts import filled
from async_opd.data.stored_rows import StoredRows, read_source

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7, "split": "train"},
}


def read(path: Path, data: DataConfig | None = None, **keys: Any) -> StoredRows:
    return read_source(FileSource(path=str(path), **keys), 0, data or DataConfig(train=[]))


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_verls_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.Table.from_pylist([VERL]), tmp_path / "rows.parquet")
    data = DataConfig(train=[], answer="reward_model.ground_truth", route_by="data_source")
    (row,) = read(tmp_path / "rows.parquet", data)
    assert (row.data_source, row.prompt, row.answer) == ("openai/gsm8k", CHAT, "4")


def test_a_source_has_its_own_names_of_fields(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", {"question": "q", "answer": "so\n#### 1,000"})
    keys = {"prompt": "question", "answer_in": "####", "data_source": "gsm8k"}
    (row,) = read(path, **keys)
    assert (row.data_source, row.prompt, row.answer) == ("gsm8k", "q", "1,000")


def test_a_missing_field_or_answer_is_refused_with_its_row_and_fields(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", VERL | {"answer": "4", "prompt": "q"})
    with pytest.raises(SourceError, match=r"'answer' has no ####") as caught:
        read(path, DataConfig(train=[], answer_in="####"))
    assert caught.value.row == 1
    with pytest.raises(SourceError, match=r"no field 'extra_info.question'; it has 'data_source'"):
        read(path, prompt="extra_info.question")


def test_nested_fields_are_read_by_their_path_and_names_with_dots_come_first() -> None:
    row = Row("0:0", "a", "x", None, VERL)
    assert filled("{extra_info.index}: {reward_model.ground_truth}", row) == "7: 4"
    assert filled("{prompt}", row) == CHAT
    assert value_at({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


@pytest.mark.parametrize(
    ("text", "place", "answer"),
    [
        ("a #### b #### 5 ", "####", "5"),
        ("no mark", "####", None),
        (r"\boxed{1} so \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "boxed", None),
        ("1", "boxed", None),
        (" 5\n", "whole", "5"),
    ],
)
def test_answers_are_found_in_texts(text: str, place: Any, answer: str | None) -> None:
    assert answer_in(text, place) == answer


balanced = st.recursive(
    st.text("ab\\ ", max_size=4), lambda inner: inner.map(lambda text: f"{{{text}}}"), max_leaves=4
)


@given(st.text(), balanced, st.text("xy}"))
def test_a_box_gives_what_was_put_into_it(before: str, inside: str, after: str) -> None:
    assert answer_in(f"{before}\\boxed{{{inside}}}{after}", "boxed") == inside.strip()


@given(st.recursive(st.none() | st.integers(), lambda one: st.dictionaries(st.text("a."), one)))
def test_no_path_into_any_fields_raises(fields: Any) -> None:
    value_at({"a": fields}, "a.a.a..a")
