"""The example of every objective: checked as ``check`` does, and run for a few steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "objectives").glob("*.yaml"))
QUICKSTART = EXAMPLES[0].parents[1] / "quickstart.yaml"
ELSEWHERE = {"k1_policy_gradient", "full_vocab"}  # tests/cluster: test_run, test_rank_layouts_run
LIKE_THE_QUICKSTART = {"forward_kl_topk", "jsd"}  # but for the objective
RUN = [e for e in EXAMPLES if e.stem not in ELSEWHERE | LIKE_THE_QUICKSTART]
STEPS = 3
FAST = [
    "teachers={sort: {model: ../quickstart/models/teacher-sort, sources: [sort, reverse]}}",
    f"train.steps={STEPS}", "train.batch_size=16", "async.sync_steps=2", "data.eval=[]",
    "log.wandb=off", "log.console=off",
]  # fmt: skip
BOUND_S = 300
CLUSTER = """
import ray
print(ray.init(include_dashboard=False, log_to_driver=False).address_info["address"], flush=True)
input()
"""


def names(path: Path) -> str:
    return path.stem


def test_there_is_one_of_each() -> None:
    assert [example.stem for example in EXAMPLES] == [
        "forward_kl_reward", "forward_kl_topk", "full_vocab", "jsd", "k1_policy_gradient",
        "reverse_kl_student_topk",
    ]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_an_example_has_no_problem(example: Path) -> None:
    assert preflight(load_config(example), example.name, 0).problems == []


@pytest.mark.parametrize("name", sorted(LIKE_THE_QUICKSTART))
def test_what_is_not_run_differs_from_the_quickstart_in_its_objective_only(name: str) -> None:
    of, quickstart = (
        json.loads(load_config(path).model_dump_json().replace("objectives/../", ""))
        for path in (EXAMPLES[0].parent / f"{name}.yaml", QUICKSTART)
    )
    assert {key for key, value in of.items() if value != quickstart[key]} <= {
        "name", "loss", "plan"
    }  # fmt: skip
    assert of["loss"]["support"] == quickstart["loss"]["support"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster that somebody else started: all examples join it, one after the other."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.communicate("", timeout=60)


@pytest.fixture(scope="module", params=RUN, ids=names)
def steps(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, address: str
) -> list[dict[str, Any]]:
    """The metrics of a few steps of each example, as a user runs it."""
    directory = tmp_path_factory.mktemp("runs") / request.param.stem
    command = [sys.executable, "-m", "async_opd.cli", "run", str(request.param), *FAST]
    done = subprocess.run(
        [
            *command,
            *(f"cluster.address={address}", "cluster.device=cpu", "--run-dir", str(directory)),
        ],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss/total" in line]


@pytest.mark.engine
@pytest.mark.long
def test_an_example_runs(steps: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(math.isfinite(line["loss/total"]) for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert any(line.get("teacher/sort/agreement", 0) < 0 for line in steps)
