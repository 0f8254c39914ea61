"""Evaluations that checkpoints are compared by: values by step, in a file of the run directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_opd.checkpoint.evaluated import EvaluatedSteps, measure_of, value_of
from async_opd.core.errors import CheckpointError
from async_opd.core.row import Row
from tests.world.config import run_config as config

METRICS = {"eval/sort/accuracy": 0.5, "eval/reverse/accuracy": 0.9, "eval/seconds": 3.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [("eval/sort/accuracy", 0.5), ("eval/*/accuracy", 0.7), ("eval/math/accuracy", None)],
)
def test_a_metric_has_its_own_value_and_a_pattern_the_mean(name: str, value: float | None) -> None:
    assert value_of(name, METRICS) == (value and pytest.approx(value))


def test_values_are_read_as_they_were_added_the_later_one_of_a_step(tmp_path: Path) -> None:
    steps = EvaluatedSteps(tmp_path / "checkpoints" / "evaluated.json")
    for step, value in ((4, 0.25), (8, 0.5), (4, 0.75)):
        steps.add(step, value)
    assert steps.values() == {4: 0.75, 8: 0.5}
    steps.forget_others({2, 4})  # the rows of the others were cut
    assert steps.values() == {4: 0.75}


def test_values_of_another_measure_are_forgotten_and_counted_at_a_resume(tmp_path: Path) -> None:
    EvaluatedSteps(tmp_path / "evaluated.json", "greedy").add(4, 0.9)
    sampled = EvaluatedSteps(tmp_path / "evaluated.json", "sampled")
    assert sampled.values() == {}
    assert (sampled.forget_others({4}), sampled.forget_others({4})) == (1, 0)
    sampled.add(8, 0.1)
    assert sampled.values() == {8: 0.1}


ROW = Row("0:0", "sort", "sort 21=", "12", {})
OTHERS: list[dict[str, Any]] = [
    {
        "checkpoint": {"keep_best": "eval/sort/accuracy"},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl"},
    },
    {"eval": {"temperature": 1}},
    {"eval": {"max_prompts": 1}},
    {"eval": {"grader": "math_verify"}},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_metric_setting_or_row_of_evaluations_is_another_measure(other: Any) -> None:
    measure = measure_of(config(), [[ROW]])
    assert measure_of(config(**other), [[ROW]]) != measure
    assert measure_of(config(), [[replace(ROW, answer="21")]]) != measure
    assert measure_of(config(eval={"every": 7}), [[ROW]]) == measure  # how often does not matter


BAD = ["no json", '{"values": {"4": "high"}}', '{"measure": "", "values": {"4": NaN}}', "[1]"]


@pytest.mark.parametrize("content", BAD)
def test_a_file_that_was_changed_is_refused_with_a_remedy(tmp_path: Path, content: str) -> None:
    path = tmp_path / "evaluated.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="remove it"):
        EvaluatedSteps(path).values()
