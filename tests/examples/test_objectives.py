"""The example of every objective, checked as ``check`` does; runs of tests/cluster run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKED = [*sorted((EXAMPLES / "objectives").glob("*.yaml")), EXAMPLES / "self_distillation.yaml"]


@pytest.mark.parametrize("example", CHECKED, ids=lambda path: path.stem)
def test_an_example_has_no_problem(example: Path) -> None:
    assert preflight(load_config(example), example.name, 0).problems == []
