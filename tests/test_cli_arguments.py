"""Arguments in any order; a name stays a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.cli import main

CONFIG = str(Path(__file__).parent.parent / "examples" / "quickstart.yaml")


def test_overrides_may_follow_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", CONFIG, "seed=4", "--sync-steps", "2", "train.steps=8"]) == 0
    assert "steps: 8\n" in capsys.readouterr().out


def test_an_unknown_option_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", CONFIG, "--sync-stps", "2"])
    assert caught.value.code == 2


def test_a_run_directory_may_look_like_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", CONFIG, "--run-dir", "2026"]) == 0
    assert "run_dir: '2026'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Trains a student model on its own rollouts"),
        (["run"], "Starts the engines, trains all steps"),
        (["check"], "without starting an engine"),
        (["plan"], "Predicts throughput and staleness"),
    ],
)
def test_help_says_what_the_command_does_with_an_example_and_the_exit_codes(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert says in shown
    assert f"  async_opd {arguments[0] if arguments else 'check'} " in shown
    assert "exit codes: 0 done, 1 failed, 2 bad config or usage, 130 interrupted" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_set_is_an_override_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "train.steps=8", "--set", "seed=5", "seed=4", "rollout.n=4"]
    assert main(["check", CONFIG, *options]) == 0
    shown = capsys.readouterr().out
    assert "steps: 8\n" in shown
    assert "seed: 5\n" in shown
    assert "  n: 4\n" in shown


@pytest.mark.parametrize("form", [[], ["--set"]])
def test_a_wrong_override_is_reported_alike_in_both_forms(
    form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", CONFIG, *form, "train.stps=8"]) == 2
    assert "command line: train.stps: unknown key (value 8)" in capsys.readouterr().err


def test_every_command_with_overrides_takes_set(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "check", "plan", "doctor", "report", "eval", "init", "quickstart"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--set a.b.c=value" in capsys.readouterr().out, command


def test_a_dry_run_checks_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", CONFIG, "--dry-run"]) == 0
    assert "6000 training prompts" in capsys.readouterr().out
    assert main(["run", CONFIG, "--dry-run", "student.model=/no/such"]) == 2
    assert list(tmp_path.iterdir()) == []
