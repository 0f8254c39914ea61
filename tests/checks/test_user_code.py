"""Graders that a config names and that cannot be loaded: each with its key and a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.sections.loss import RewardConfig
from tests.checks.inputs import config, found, one


def test_the_rewards_grader_is_checked_as_the_evaluations() -> None:
    reward = {"reward": RewardConfig(grader="no_such_module:grade")}
    (problem,) = preflight(config().model_copy(update=reward), "c.yaml", 0).problems
    assert problem.key == "reward.grader"


def test_a_grader_that_cannot_be_imported_is_refused() -> None:
    assert one("eval.grader=no_such_module:grade", load=True).key == "eval.grader"


@pytest.mark.parametrize(
    "code", ["def f(:", "x = 1 / 0", "raise SystemExit", "import os; os._exit(3)"]
)
def test_a_grader_module_that_cannot_be_imported_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / f"grader{len(code)}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert one(f"eval.grader=grader{len(code)}:f", load=True).key == "eval.grader"


@pytest.mark.slow
def test_a_graders_module_that_does_not_end_is_a_problem_after_the_bound_of_a_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "endless.py").write_text("while True:\n    pass\n")
    problem = one(f"eval.grader={tmp_path}/endless.py:f", "timeouts.engine_start_s=1", load=True)
    assert "longer than 1 s (timeouts.engine_start_s)" in problem.message


def test_a_graders_module_is_not_imported_into_the_process_that_checks_it(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    code = f"import os\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\n"
    (tmp_path / "leaves.py").write_text(f"{code}def f(response, row):\n    return 1\n")
    assert found(f"eval.grader={tmp_path}/leaves.py:f", load=True) == []
    assert int(marker.read_text()) != os.getpid()
