"""Preflight: everything that is wrong, reported together; and the hardware."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from async_opd.checks import resources
from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from tests.checks.inputs import EXAMPLE, GOOD, config, found, one, rows


def test_the_quickstart_has_no_problem() -> None:
    assert found() == []


def test_more_gpus_than_there_are_are_refused_with_the_sum() -> None:
    problem = one("cluster.device=cuda", "rollout.replicas=2", gpus=4)
    assert "take 5 GPUs" in problem.message
    assert "this machine has 4" in problem.message


def test_enough_gpus_are_taken() -> None:
    assert found("cluster.device=cuda", gpus=4) == []


def test_one_gpu_for_a_run_of_four_pools_has_the_keys_by_which_they_share_it() -> None:
    problem = one("cluster.device=cuda", gpus=1)
    shared = [word for word in problem.remedy.replace(";", " ").split() if "=" in word]
    assert found("cluster.device=cuda", *shared, gpus=1) == []


def test_two_gpus_are_shared_by_engines_alone() -> None:
    remedy = one("cluster.device=cuda", gpus=2).remedy
    assert "teachers.reverse.with=rollout" in remedy
    assert "rollout.with=train" not in remedy


def test_a_teacher_that_cannot_move_hinders_no_other_pool() -> None:
    replicas = "teachers.sort.replicas=2"  # more than the student has, whose GPUs it could share
    assert "teachers.reverse.with=rollout" in one("cluster.device=cuda", replicas, gpus=4).remedy


def test_a_teacher_whose_name_is_not_a_word_is_quoted() -> None:
    named = "teachers={a b: {model: quickstart/models/teacher-sort, sources: [sort, reverse]}}"
    assert "'teachers.a b.with=rollout'" in one("cluster.device=cuda", named, gpus=1).remedy


def test_pools_that_cannot_share_get_no_keys_to_do_so() -> None:
    problem = one("cluster.device=cuda", "train.ranks=2", gpus=1)
    assert problem.remedy.startswith("take fewer replicas")


@pytest.fixture
def torch_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is built for CPUs, on a machine with two GPUs."""
    monkeypatch.setattr(resources, "installed", lambda name: "2.13.0+cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")


@pytest.mark.usefixtures("torch_for_cpus")
def test_a_machine_with_gpus_and_a_pytorch_for_cpus_computes_on_the_cpu_and_says_why() -> None:
    inputs = preflight(config(), "c.yaml")
    assert (inputs.problems, inputs.device) == ([], "cpu")
    assert "PyTorch 2.13.0+cpu is built for CPUs and does not use the 2 GPUs" in inputs.notes[0]


@pytest.mark.usefixtures("torch_for_cpus")
@pytest.mark.parametrize("visible", ["0,3", ""])
def test_gpus_that_the_installed_pytorch_cannot_use_are_refused(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (problem,) = preflight(config("cluster.device=cuda"), "c.yaml").problems
    assert problem.key == "cluster.device"
    assert "is built for CPUs" in problem.message


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


def test_pools_that_do_not_fit_the_gpu_that_they_share_are_refused() -> None:
    shared = [f"teachers.sort.{key}" for key in ("placement=colocated", "with=rollout")]
    shared.append("cluster.gpu_memory_gib=24")
    assert found(*shared, gpus=8) == []
    fixed = "teachers.sort.engine.gpu_memory_utilization=0.95"
    problem = one(*shared, fixed, gpus=8)
    assert problem.where.endswith("c.yaml")
    assert "at most 0.85 beside the others on it" in problem.message


def test_a_pool_that_needs_more_than_its_gpu_is_refused_with_its_terms() -> None:
    fault = found("cluster.gpu_memory_gib=1.001", "train.batch_size=2000", gpus=8)
    assert {problem.key for problem in fault} == {
        "train", "rollout", "teachers.sort", "teachers.reverse",
    }  # fmt: skip
    assert "(CUDA context 1.0 GiB" in fault[0].message


@pytest.mark.parametrize("moments", ["bfloat16", "8bit"])
def test_low_bit_moments_without_torchao_are_refused_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    assert found(f"train.moments={moments}") == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = one(f"train.moments={moments}")
    assert problem.key == "train.moments"
    assert "torchao, which is not installed" in problem.message
    assert problem.remedy == "pip install async-opd[lowbit]"


def test_a_mirror_without_its_package_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror = "checkpoint.mirror=memory://bucket/run"
    assert found(mirror) == []
    assert "Protocol not known" in one("checkpoint.mirror=nowhere://bucket/run").message
    monkeypatch.setitem(sys.modules, "fsspec", None)
    problem = one(mirror)
    assert problem.key == "checkpoint.mirror"
    assert "pip install 'async-opd[storage]'" in problem.message


@pytest.mark.parametrize(("offload", "said"), [("moments", True), ("none", False)])
def test_offloading_on_a_cpu_is_reported_to_have_no_effect(offload: str, said: bool) -> None:
    notes = preflight(config(f"train.offload={offload}"), "c.yaml", 0).notes
    assert any("train.offload has no effect" in note for note in notes) is said


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_an_address_in_the_environment_that_names_no_node_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    problem = one("cluster.device=cpu")
    assert (problem.where, problem.key) == ("the environment", "cluster.address")
    assert f"RAY_ADDRESS is {address}" in problem.message


@pytest.mark.usefixtures("torch_for_cpus")
@pytest.mark.parametrize(("given", "note"), [("auto", "auto is cpu"), ("cuda", "no run can start")])
def test_the_config_of_a_cluster_can_be_checked_with_a_pytorch_for_cpus(
    given: str, note: str
) -> None:
    joined = config("cluster.address=10.0.0.1:6379", f"cluster.device={given}")
    inputs = preflight(joined, "c.yaml")
    assert inputs.problems == []
    assert any(note in one for one in inputs.notes)
