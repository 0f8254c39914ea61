"""Processes killed in a run whose two ranks take turns with the rollout engine on the same GPUs."""

from __future__ import annotations

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_run import ONE_TEACHER, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 16


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "colocated",
        ONE_TEACHER,
        *("rollout.placement=colocated", "rollout.with=train", "train.ranks=2"),
        f"train.steps={STEPS}",
        "eval.every=0",
        "eval.teachers=false",
        "checkpoint.every=1",
        "log.wandb=off",
    )
    running.until("step 0, version 0")
    running.processes("rollouter")["actor"].kill()
    running.until("rollouter is rebuilt")
    running.processes("student/0")["engine"].kill()
    running.until("student/0 is rebuilt")
    running.until("checkpoint of step 4")
    running.processes("trainer/1")["actor"].kill()
    running.until("the run goes on after step")
    running.until("checkpoint of step 8")
    running.processes("trainer")["actor"].kill()
    running.until("the run goes on after step", times=2)
    running.look()
    return running.end()


def test_the_run_completes_and_every_sample_is_trained_once(survived: Run) -> None:
    assert (survived.code, survived.summary["status"]) == (0, "completed"), survived.output
    found = audit(survived.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * 128, (), ())


def test_the_engine_outlives_the_trainer(survived: Run) -> None:
    assert survived.summary["rollout/rebuilds"] == 1, survived.output
    assert survived.output.count("everything is up") == 1


def test_no_process_is_left_behind(survived: Run) -> None:
    assert survived.left == []
