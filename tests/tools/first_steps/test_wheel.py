"""A new user has the wheel and an empty directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.wheel import ROOT, environment, install_wheel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def said(installed: Path, folder: Path, *command: str) -> str:
    """The output of a command that ends with exit code 0."""
    done = subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=folder,
        env=environment(installed),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_quickstart_can_run_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    where = said(installed, tmp_path, "python", "-c", "import async_opd; print(async_opd.__file__)")
    assert not Path(where.strip()).is_relative_to(ROOT)
    checked = said(installed, tmp_path, "async_opd", "quickstart", "--dry-run")
    assert "6000 training prompts" in checked
    assert "512 evaluation prompts" in checked
    assert list(tmp_path.iterdir()) == []


def test_a_first_config_of_the_quickstarts_copy_passes_check(
    installed: Path, tmp_path: Path
) -> None:
    copy = "from async_opd.tools.first_steps.command import copy_to; from pathlib import Path; "
    said(installed, tmp_path, "python", "-c", f"{copy}copy_to(Path())")
    models, data = "quickstart/models", "quickstart/data"
    given = ["--student", f"{models}/student", "--teacher", f"sort={models}/teacher-sort"]
    given += ["--teacher", f"reverse={models}/teacher-reverse", "--data", f"{data}/train.jsonl"]
    said(installed, tmp_path, "async_opd", "init", *given, "--set", "rollout.max_tokens=8")
    assert "6000 training prompts" in said(installed, tmp_path, "async_opd", "check", "config.yaml")
