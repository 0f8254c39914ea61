"""Teachers killed or stopped in the middle of a real run: nothing is lost or trained twice."""

from __future__ import annotations

import re

import pytest

from tests.cluster.test_run import Run, Running

pytestmark = pytest.mark.engine

STEPS = 30


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "survived",
        "teachers.sort.replicas=2",
        "teachers.sort.health={timeout_s: 10, probes: 1}",
        f"train.steps={STEPS}",
        "eval.every=0",
        "log.wandb=off",
    )
    running.until("step 0, version 0: eval_teacher")
    running.processes("teacher sort/0")["engine"].kill()
    running.processes("teacher sort/1")["engine"].suspend()
    running.processes("teacher reverse/0")["actor"].kill()
    running.until("teacher reverse/0 is rebuilt")
    running.look()
    return running.end()


def test_a_run_whose_teachers_are_killed_or_stopped_exits_0(survived: Run) -> None:
    assert (survived.code, survived.summary["status"]) == (0, "completed"), survived.output


def test_no_sample_of_it_is_lost_and_none_trained_twice(survived: Run) -> None:
    states = ("trained", "in_flight", "dead_lettered")
    counts = [survived.summary[f"ledger/{state}"] for state in states]
    assert counts == [STEPS * 128, 0, 0]


def test_its_metrics_count_the_failures_and_the_rebuild(survived: Run) -> None:
    assert survived.summary["teacher/reverse/rebuilds"] == 1
    assert survived.summary["teacher/sort/failures"] >= 1


def test_its_log_says_what_became_of_the_replicas(survived: Run) -> None:
    log = (survived.directory / "run.log").read_text()
    assert "teacher sort/0 ejected" in log
    assert re.search(r"teacher sort/1 ejected: .* took longer than", log)
    assert "teacher reverse/0 is being rebuilt" in log


def test_it_leaves_no_process_behind(survived: Run) -> None:
    assert survived.left == []
