"""The example in which the student is its own teacher, run for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_run import Run, Running

EXAMPLE = Path(__file__).parents[2] / "examples" / "self_distillation.yaml"


pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.whole]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "self",
        *("teachers.easier.refresh_every=1", "eval.every=0", "log.wandb=off"),
        example=EXAMPLE,
    )
    return running.end()


def test_it_runs_and_its_teacher_is_better_and_refreshed(done: Run) -> None:
    assert (done.code, done.summary["ledger/trained"]) == (0, 6 * 128), done.output
    # the teacher finds its own prompt easier than the student does
    assert done.summary["eval_teacher/sort/accuracy"] > done.summary["eval_initial/sort/accuracy"]
    last = [line for line in done.metrics if "teacher/easier/version" in line][-1]
    assert last["teacher/easier/version"] >= 2
    assert "teacher/frozen/version" not in last
    assert [copy.name for copy in (done.directory / "teachers").iterdir()] == ["version_3"]
