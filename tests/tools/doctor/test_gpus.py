"""What the doctor says of pools on GPUs, which this machine need not have."""

from __future__ import annotations

import pytest

from async_opd.checks.nodes import RESIZE
from async_opd.models.engine_args import Device
from async_opd.tools.doctor.machine import devices, memory, network
from tests.checks.inputs import config

DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def test_pools_on_gpus_have_their_gpus_named() -> None:
    lines = [one.found for one in devices(config("cluster.device=cuda"), "cuda", 4)]
    assert lines[0] == "all pools compute on cuda; GPUs that PyTorch can use here: 4"
    assert lines[1].startswith("rollout: 1 replicas, 1 GPU each, ")


def test_gpus_that_a_run_on_the_cpu_does_not_use_are_a_warning() -> None:
    warned = [one for one in devices(config(), "cpu", 2) if one.status == "warning"]
    assert [one.remedy for one in warned] == ["set cluster.device to auto"]


def test_the_memory_of_gpus_that_is_not_known_is_a_warning() -> None:
    unknown = config("cluster.device=cuda", "cluster.address=10.0.0.1:6379")
    line = next(iter(memory(unknown, "cuda", 0)))
    assert (line.status, "cluster.gpu_memory_gib" in line.remedy) == ("warning", True)


def test_each_pool_has_a_line_for_its_gpus_memory() -> None:
    known = config("cluster.device=cuda", "cluster.gpu_memory_gib=80")
    lines = [one.found for one in memory(known, "cuda", 4)]
    assert lines[0] == "each GPU has 80.0 GiB"
    assert any(one.startswith("rollout: 1 processes of ") and "of the GPU" in one for one in lines)


def test_little_shared_memory_is_an_error_with_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_opd.checks.nodes._shm_mib", lambda: 64)
    faults = {
        device: [one.remedy for one in network(config(), device) if one.status == "error"]
        for device in DEVICES
    }
    assert faults == {"cpu": [], "cuda": [RESIZE]}


def test_a_model_that_is_not_on_this_machine_is_not_planned_as_an_empty_one() -> None:
    known = config("cluster.device=cuda", "cluster.gpu_memory_gib=80", "student.model=org/student")
    unknown = list(memory(known, "cuda", 4))[-1]
    assert (unknown.status, unknown.found) == (
        "warning",
        "unknown: the weights of org/student are not on this machine",
    )
