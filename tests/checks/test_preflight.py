"""Preflight: everything that is wrong, reported together; and the hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.checks.preflight import preflight
from async_opd.checks.resources import gpu_count
from async_opd.config.load import load_config
from tests.checks.inputs import EXAMPLE, GOOD, found, one, rows


def test_the_quickstart_has_no_problem() -> None:
    assert found() == []


def test_more_gpus_than_there_are_are_refused_with_the_sum() -> None:
    problem = one("cluster.device=cuda", "rollout.replicas=2", gpus=4)
    assert "take 5 GPUs" in problem.message
    assert "this machine has 4" in problem.message


def test_enough_gpus_are_taken() -> None:
    assert found("cluster.device=cuda", gpus=4) == []


def test_visible_gpus_are_those_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert gpu_count() == 2


def test_everything_is_reported_together(tmp_path: Path) -> None:
    keys = [
        problem.key
        for problem in found(
            "loss.top_k=129",
            "eval.grader=nonsense",
            "teachers.sort.model=/no/such",
            "cluster.device=cuda",
            rows(tmp_path, *GOOD, {"prompt": "x", "data_source": "add"}),
            gpus=1,
        )
    ]
    assert set(keys) == {
        "loss.top_k", "eval.grader", "teachers.sort.model", "cluster", "teachers",
    }  # fmt: skip


def test_rows_are_handed_on_to_the_run() -> None:
    inputs = preflight(load_config(EXAMPLE), "c.yaml", 0)
    assert (len(inputs.checked[0]), sum(map(len, inputs.eval))) == (6000, 512)
