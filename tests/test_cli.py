"""The command line: exit codes, flags, and what ``check`` does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.cli import main
from tests.checks.inputs import FEW

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "quickstart.yaml")


def test_check_exits_0_on_the_quickstart() -> None:
    assert main(["check", EXAMPLE]) == 0


def test_check_prints_the_resolved_config_and_the_pools(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", EXAMPLE])
    printed = capsys.readouterr().out
    assert "sync_steps: 4" in printed
    assert "teachers.reverse" in printed


def test_check_says_that_only_a_run_asks_the_cluster_for_its_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main(["check", EXAMPLE, *FEW]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "auto is taken for cuda here; a run asks the cluster at 10.0.0.1:6379" in words


def test_check_prints_what_a_step_moves_and_what_the_queue_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["check", EXAMPLE, "loss={kind: forward_kl, top_k: 8}", "rollout.max_tokens=32"])
    printed = capsys.readouterr().out
    assert "teacher sort: teacher_topk, 8 bytes a response token of a rollout, 80 of a" in printed
    assert "with 32 response tokens: a rollout" in printed
    assert "a step moves" in printed


def test_the_flags_set_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", EXAMPLE, "--staleness-threshold", "2", "--sync-steps", "9", "--run-dir", "here"])
    printed = capsys.readouterr().out
    assert "staleness_threshold: 2.0" in printed
    assert "sync_steps: 9" in printed
    assert "run_dir: here" in printed


@pytest.mark.parametrize("command", ["check", "run"])
def test_bad_input_exits_2_and_says_everything(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, EXAMPLE, "eval.grader=nonsense", "student.model=/no/such/model"]) == 2
    printed = capsys.readouterr().err
    assert "eval.grader" in printed
    assert "/no/such/model" in printed


def test_a_missing_config_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/no/such.yaml"]) == 2


def test_a_wrong_command_exits_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["dance"])
    assert caught.value.code == 2


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["run", EXAMPLE, "seed=x"]])
def test_a_run_loads_no_other_command(words: list[str]) -> None:
    code = (
        "import sys; from async_opd.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('async_opd.tools')])"
    )
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_config_is_read_without_libraries_of_data() -> None:
    code = (
        "import sys; from async_opd.config import run_config;"
        "print([m for m in ('numpy', 'pyarrow', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_check_imports_neither_torch_nor_ray_nor_vllm() -> None:
    code = (
        "import sys; from async_opd.cli import main; main(sys.argv[1:]);"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, "check", EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
