"""Evaluations that checkpoints are compared by: values by step, in a file of the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.checkpoint.evaluated import EvaluatedSteps, value_of
from async_opd.core.errors import CheckpointError

METRICS = {"eval/sort/accuracy": 0.5, "eval/reverse/accuracy": 0.9, "eval/seconds": 3.0}


def test_a_metric_has_its_own_value() -> None:
    assert value_of("eval/sort/accuracy", METRICS) == 0.5


def test_a_pattern_has_the_mean_of_what_it_matches() -> None:
    assert value_of("eval/*/accuracy", METRICS) == pytest.approx(0.7)


def test_an_evaluation_without_the_metric_has_no_value() -> None:
    assert value_of("eval/*/accuracy", {"eval_initial/sort/accuracy": 0.5}) is None


def test_values_are_read_as_they_were_added(tmp_path: Path) -> None:
    steps = EvaluatedSteps(tmp_path / "checkpoints" / "evaluated.json")
    steps.add(4, 0.25)
    steps.add(8, 0.5)
    assert steps.values() == {4: 0.25, 8: 0.5}


def test_a_step_that_is_evaluated_again_has_the_later_value(tmp_path: Path) -> None:
    steps = EvaluatedSteps(tmp_path / "evaluated.json")
    steps.add(4, 0.25)
    steps.add(4, 0.5)
    assert steps.values() == {4: 0.5}


def test_values_of_later_steps_are_forgotten_at_a_rewind(tmp_path: Path) -> None:
    steps = EvaluatedSteps(tmp_path / "evaluated.json")
    steps.add(4, 0.25)
    steps.add(8, 0.5)
    steps.forget_after(4)
    assert steps.values() == {4: 0.25}


@pytest.mark.parametrize("content", ["no json", '{"4": "high"}', '{"4": NaN}', "[1]"])
def test_a_file_that_was_changed_is_refused_with_a_remedy(tmp_path: Path, content: str) -> None:
    path = tmp_path / "evaluated.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="remove it"):
        EvaluatedSteps(path).values()
