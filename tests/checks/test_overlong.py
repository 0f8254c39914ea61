"""Prompts that are too long are refused, left out or cut off, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.checks.data import Rows
from async_opd.checks.preflight import Inputs, preflight
from async_opd.core.row import Row
from async_opd.core.samples import Prompt
from async_opd.data.prompts import to_prompt
from async_opd.data.streamed_rows import StreamedRows
from tests.checks.inputs import GOOD, config, rows

LONG = {"prompt": "sort " + "1" * 20 + "=", "data_source": "sort"}
BOUND = ("data.max_prompt_tokens=12", "data.eval=[]")


def streamed(tmp_path: Path, *entries: dict[str, str]) -> str:
    path = rows(tmp_path, *entries).partition("[")[2].rstrip("]")
    return f"data.train=[{{path: {path}, stream: true, window: 2}}]"


def checked(
    tmp_path: Path, overlong: str, *entries: dict[str, str], stream: bool = False
) -> Inputs:
    train = (streamed if stream else rows)(tmp_path, *entries)
    return preflight(config(train, *BOUND, f"data.overlong={overlong}"), "c.yaml", 0)


def prompts(made: Rows) -> list[object]:
    if isinstance(made, StreamedRows):
        entries = [made.taken(at, None)[0] for at in range(2)]
        return [entry.prompt for entry in entries if isinstance(entry, Row)]
    return [row.prompt for row in made]


@pytest.mark.parametrize("stream", [False, True])
def test_rows_with_longer_prompts_are_left_out_and_counted(tmp_path: Path, stream: bool) -> None:
    inputs = checked(tmp_path, "filter", LONG, *GOOD, LONG, stream=stream)
    assert inputs.problems == []
    assert prompts(inputs.train[0]) == ["sort 1=", "x"]
    counted = "1 of 2" if stream else "2 of 4"
    assert any(f"{counted} prompts" in note and "left out" in note for note in inputs.notes)


def test_cut_prompts_keep_their_rows_and_their_last_tokens(tmp_path: Path) -> None:
    inputs = checked(tmp_path, "truncate_left", LONG, *GOOD)
    assert inputs.problems == []
    assert len(inputs.checked[0]) == 3
    assert any("1 of 3 prompts" in note and "cut off" in note for note in inputs.notes)
    row = Row("0:0", "a", "abcdef", None, {})
    made = to_prompt(row, lambda text: list(map(ord, str(text))), str, limit=2, truncate=True)
    assert isinstance(made, Prompt)
    assert "".join(map(chr, made.token_ids)) == "ef"


def test_longer_prompts_are_refused_by_default(tmp_path: Path) -> None:
    (problem,) = checked(tmp_path, "refuse", LONG, *GOOD).problems
    assert "1 prompts are empty or longer than 12 tokens" in problem.message


def test_a_filter_that_leaves_no_row_is_refused(tmp_path: Path) -> None:
    assert "data.overlong leaves no row" in {
        problem.message for problem in checked(tmp_path, "filter", LONG).problems
    }


def sources(tmp_path: Path, *sizes: int) -> str:
    entries = []
    for size in sizes:
        (tmp_path / str(size)).mkdir()
        entries.append(rows(tmp_path / str(size), *GOOD * size).partition("[")[2].rstrip("]"))
    return f"data.train=[{', '.join(entries)}]"


def test_check_notes_how_often_epochs_take_the_rows_of_sources_that_are_mixed_by_weight(
    tmp_path: Path,
) -> None:
    epochs = ("train={epochs: 2, batch_size: 64}", "data.eval=[]", sources(tmp_path, 1, 4))
    (note,) = (
        note
        for note in preflight(config(*epochs), "c.yaml", 0).notes
        if note.startswith("train.epochs")
    )
    assert "1/rows.jsonl 5 times" in note
    assert "4/rows.jsonl 1.25 times; data.size_temperature: 1 takes all equally often" in note
    by_size = preflight(config(*epochs, "data.size_temperature=1"), "c.yaml", 0).notes
    assert not any(note.startswith("train.epochs") for note in by_size)


@pytest.mark.parametrize("key", ["data.size_temperature=2", "train={epochs: 2, batch_size: 64}"])
def test_what_needs_the_size_of_a_streamed_source_is_refused(tmp_path: Path, key: str) -> None:
    made = config(streamed(tmp_path, *GOOD), "data.eval=[]", key)
    (problem,) = preflight(made, "c.yaml", 0).problems
    assert problem.key in ("data.size_temperature", "train.epochs")
    assert "is streamed" in problem.message
