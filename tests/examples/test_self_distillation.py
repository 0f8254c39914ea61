"""The example in which the student is its own teacher, run for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_run import Run, Running

EXAMPLE = Path(__file__).parents[2] / "examples" / "self_distillation.yaml"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "self",
        *("teachers.easier.refresh_every=1", "eval.every=0", "log.wandb=off"),
        example=EXAMPLE,
    )
    return running.end()


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.whole
def test_it_runs(done: Run) -> None:
    assert (done.code, done.summary["ledger/trained"]) == (0, 6 * 128), done.output


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.whole
def test_the_teacher_finds_its_own_prompt_easier_than_the_student_does(done: Run) -> None:
    assert done.summary["eval_teacher/sort/accuracy"] > done.summary["eval_initial/sort/accuracy"]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.whole
def test_the_refreshed_teacher_has_new_weights_and_the_frozen_one_none(done: Run) -> None:
    last = [line for line in done.metrics if "teacher/easier/version" in line][-1]
    assert last["teacher/easier/version"] >= 2
    assert "teacher/frozen/version" not in last


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.whole
def test_one_copy_of_the_weights_is_left(done: Run) -> None:
    assert [copy.name for copy in (done.directory / "teachers").iterdir()] == ["version_3"]
