"""``async_opd check --cluster`` on a Ray cluster of two nodes, and where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from async_opd.checks import nodes
from async_opd.cli import main
from tests.checks.inputs import EXAMPLE, FEW
from tests.world.ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster whose second node has GPUs, and another setting of NCCL."""
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        other = {**node, "num_gpus": 8, "env_vars": {"NCCL_ALGO": "Tree"}}
        other |= {"labels": {"market": "spot"}, "resources": {"reliable": 1}}
        with ray_cluster({**node, "num_gpus": 0}, other, joined=False) as cluster:
            yield cluster.address


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_for_gpus: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nodes, "MIN_SHM_MIB", 0)


def check(*given: str) -> int:
    return main(["check", str(EXAMPLE), *FEW, "--cluster", *given])


def rows(printed: str) -> list[list[str]]:
    """The cells of the table of nodes."""
    lines = printed.partition("nodes of the cluster")[2].splitlines()
    return [[cell.strip() for cell in row.split("│")[1:-1]] for row in lines if row.startswith("│")]


@pytest.mark.engine
def test_it_shows_what_would_be_placed_on_which_node_and_leaves_nothing(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert check(f"cluster.address={address}", "rollout.replicas=3") == 0
    cpu, gpu = sorted(rows(capsys.readouterr().out), key=lambda row: row[2])
    assert (cpu[2:5], cpu[7]) == (["0", "0", "1"], "-")
    assert gpu[2:5] == ["8", "8", "1"]
    names = "student/0, student/1, student/2, teacher sort/0, teacher reverse/0, trainer"
    assert gpu[7] == names
    assert re.fullmatch(r"\S+ \([\d.]+\)", gpu[1])
    assert re.fullmatch(r"[\d.]+ GiB", gpu[5])
    assert os.listdir() == []
    assert not ray.is_initialized()


@pytest.mark.engine
def test_nodes_that_differ_and_a_shortage_are_one_list_of_problems(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    assert check("rollout.replicas=6") == 2
    shown = capsys.readouterr().err
    assert "2 problems" in shown
    assert "NCCL_ALGO is nothing on the driver's node, Tree on" in shown
    assert "the pools need 9 GPUs, each engine's on one node; the cluster has 8" in shown


@pytest.mark.engine
def test_a_shortage_for_which_a_run_would_wait_is_no_problem(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert check(f"cluster.address={address}", "rollout.replicas=6", "cluster.wait_s=60") == 0
    assert "the run would wait for GPUs: the pools need 9 GPUs" in capsys.readouterr().out


@pytest.mark.engine
def test_pools_go_to_nodes_with_their_labels_and_resources_or_to_none(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    given = f"cluster.address={address}", "cluster.device=cpu", "rollout.replicas=2"
    marks = "cluster.labels={rollout: {market: spot}}", "cluster.resources={train: [reliable]}"
    assert check(*given, *marks) == 0
    places = {row[2]: row[7] for row in rows(capsys.readouterr().out)}
    assert places["8"] == "student/0, student/1, trainer"
    assert places["0"] == "teacher sort/0, teacher reverse/0"
    assert check(*given, "cluster.labels={rollout: {market: none}}") == 2
    assert "no node has market=none, which rollout needs" in capsys.readouterr().err
    assert check(*given, "cluster.labels={student: {market: none}}") == 2
    assert "one of rollout, teachers.sort, teachers.reverse, train" in capsys.readouterr().err


@pytest.mark.engine
def test_code_of_a_user_that_nodes_lack_is_named_and_ray_brings_it(
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "grades_here.py").write_text("def f(response, row): return 1.0")
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    given = f"cluster.address={address}", "reward.grader=grades_here:f", "rollout.n=4"
    assert check(*given) == 0  # runs no code
    assert check(*given, "--load") == 2
    shown = capsys.readouterr().err
    assert re.search(r"reward.grader: on .* No module named 'grades_here'", shown)
    brought = "cluster.runtime_env={working_dir: code}"
    assert check(*given, brought, "cluster.env={MY_DATA: here}", "--load") == 0


@pytest.mark.engine
def test_what_ray_refuses_of_the_runtime_env_is_named(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    given = f"cluster.address={address}", "cluster.runtime_env={working_dir: none_such}"
    assert check(*given) == 0  # an environment may run code
    assert check(*given, "--load") == 1
    shown = capsys.readouterr().err
    assert "none_such" in shown
    assert "correct cluster.runtime_env" in shown


def test_without_a_named_cluster_it_is_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert check() == 2
    shown = capsys.readouterr()
    assert (shown.out, "no cluster is named" in shown.err) == ("", True)
    assert "set cluster.address=auto, or RAY_ADDRESS" in shown.err


@pytest.mark.engine
def test_a_cluster_that_is_not_running_is_a_failure_with_a_remedy() -> None:
    given = ["check", str(EXAMPLE), *FEW, "--cluster", "cluster.address=127.0.0.1:9"]
    names = ("gcs_rpc_server_connect_timeout_s", "py_gcs_connect_timeout_s")
    soon = {"RAY_NUM_REDIS_GET_RETRIES": "1", **{f"RAY_{name}": "1" for name in names}}
    command = [sys.executable, "-m", "async_opd", *given]  # Ray reads these when it is imported
    done = subprocess.run(
        command, env={**os.environ, **soon}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "cluster at '127.0.0.1:9'" in done.stderr
    assert "check cluster.address" in done.stderr
