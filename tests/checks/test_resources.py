"""Counting GPUs without torch."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks import resources
from async_opd.core.errors import ConfigError
from tests.checks.inputs import config


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No environment variable, no driver; ``nvidia-smi`` is there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(resources, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return monkeypatch


@pytest.mark.parametrize(("value", "count"), [("0,3", 2), ("", 0), ("-1", 0), ("0,-1,1", 1)])
def test_visible_devices_end_at_the_first_that_is_none(
    bare: pytest.MonkeyPatch, value: str, count: int
) -> None:
    bare.setenv("CUDA_VISIBLE_DEVICES", value)
    assert resources.gpu_count() == count


def test_the_drivers_list_is_counted(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("0000:01", "0000:02"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert resources.gpu_count() == 2


def test_the_lines_of_nvidia_smi_are_counted(bare: pytest.MonkeyPatch) -> None:
    def listed(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, "GPU 0: NVIDIA H200\nGPU 1: NVIDIA H200\n", "")

    bare.setattr(subprocess, "run", listed)
    assert resources.gpu_count() == 2


def test_without_nvidia_smi_there_are_none(bare: pytest.MonkeyPatch) -> None:
    bare.setattr("shutil.which", lambda name: None)
    assert resources.gpu_count() == 0


def test_a_driver_that_does_not_answer_is_a_problem_and_not_a_cpu(bare: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    bare.setattr(subprocess, "run", hang)
    with pytest.raises(ConfigError, match=r"cluster\.device"):
        resources.gpu_count()


@pytest.mark.parametrize(
    ("lines", "nbytes"),
    [
        ("81559, 551\n24564, 300\n", 24264 << 20),
        ("24564, [N/A]\n", 24564 << 20),
        ("", None),
        ("[N/A], [N/A]\n", None),
    ],
)
def test_the_memory_of_the_smallest_gpu_is_read_without_what_its_driver_reserves(
    bare: pytest.MonkeyPatch, lines: str, nbytes: int | None
) -> None:
    def listed(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, lines, "")

    bare.setattr(subprocess, "run", listed)
    assert resources.gpu_bytes(config()) == nbytes


def test_without_nvidia_smi_the_memory_is_not_known(bare: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    bare.setattr(subprocess, "run", missing)
    assert resources.gpu_bytes(config()) is None


def test_the_config_says_the_memory_of_gpus_that_this_machine_does_not_have(
    bare: pytest.MonkeyPatch,
) -> None:
    bare.setattr(subprocess, "run", None)
    assert resources.gpu_bytes(config("cluster.gpu_memory_gib=40")) == 40 << 30
    assert resources.gpu_bytes(config("cluster.address=auto")) is None


def test_replicas_that_only_evaluate_are_a_pool_with_gpus_of_its_own() -> None:
    taken = {pool.name: pool.gpus for pool in resources.pools(config("eval.replicas=2"))}
    assert taken["eval"] == 2
    assert "eval" not in {pool.name for pool in resources.pools(config())}


def test_a_joined_cluster_of_a_pytorch_for_cpus_computes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "installed", lambda name: "2.13.0+cpu")
    joined, notes = resources.with_device(config("cluster.address=10.0.0.1:6379"))
    assert joined.cluster.device == "cpu"
    assert "PyTorch 2.13.0+cpu is built for CPUs" in notes[0]
