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
