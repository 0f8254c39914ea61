"""The example of every objective, checked as ``check`` does; runs of tests/cluster run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config

CLUSTER = Path(__file__).parents[1] / "cluster"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "objectives").glob("*.yaml"))
QUICKSTART = EXAMPLES[0].parents[1] / "quickstart.yaml"
RUN_BY = {
    "forward_kl_reward": "test_colocated_trainer_run.py",
    "k1_policy_gradient": "test_run.py",
    "reverse_kl_student_topk": "test_colocated_run.py",
}
LIKE_THE_QUICKSTART = {"forward_kl_topk", "full_vocab", "jsd"}  # but for the objective
"""``test_rank_layouts_run.py`` runs the quickstart over the full vocabulary."""


def test_there_is_one_of_each() -> None:
    assert [example.stem for example in EXAMPLES] == sorted({*RUN_BY, *LIKE_THE_QUICKSTART})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_no_problem(example: Path) -> None:
    assert preflight(load_config(example), example.name, 0).problems == []


@pytest.mark.parametrize(("name", "run"), RUN_BY.items())
def test_a_whole_run_runs_it(name: str, run: str) -> None:
    assert f'"{name}.yaml"' in (CLUSTER / run).read_text()


@pytest.mark.parametrize("name", sorted(LIKE_THE_QUICKSTART))
def test_what_is_not_run_differs_from_the_quickstart_in_its_objective_only(name: str) -> None:
    of, quickstart = (
        json.loads(load_config(path).model_dump_json().replace("objectives/../", ""))
        for path in (EXAMPLES[0].parent / f"{name}.yaml", QUICKSTART)
    )
    assert {key for key, value in of.items() if value != quickstart[key]} <= {
        "name", "loss", "plan"
    }  # fmt: skip
