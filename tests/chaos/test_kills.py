"""Processes killed and stopped, one after the other, in one real run.

First the scoring stage and both replicas of the only teacher fail, then the one student replica.
Without them nothing can be trained: the run waits for each repair, and the next blow comes after
it. (A stopped engine of a teacher is found out in less time than another one takes to start.)
"""

from __future__ import annotations

import re

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_run import Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 24
TEACHER = (
    "teachers={sort: {model: quickstart/models/teacher-sort, sources: [sort, reverse], "
    "replicas: 2, health: {timeout_s: 5, probes: 1}}}"
)


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "kills",
        TEACHER,
        f"train.steps={STEPS}",
        "train.ranks=2",
        "eval.every=0",
        "eval.teachers=false",
        "supervision.heartbeat_s=2",
        "supervision.timeout_s=20",
        "checkpoint.every=1",
        "log.wandb=off",
    )
    running.until("step 0, version 0")
    running.processes("scorer")["actor"].kill()
    running.processes("rollouter")["actor"].kill()
    running.processes("teacher sort/0")["engine"].kill()
    running.processes("teacher sort/1")["engine"].suspend()
    running.until("scorer is rebuilt")
    running.until("rollouter is rebuilt")
    running.until("teacher sort/1 is being rebuilt")
    running.until("teacher sort/0 is rebuilt")
    running.processes("student/0")["engine"].kill()
    running.until("student/0 is rebuilt")
    running.processes("student/0")["actor"].kill()
    running.until("student/0 is rebuilt", times=2)
    running.processes("student/0")["engine"].suspend()
    running.until("student/0 is rebuilt", times=3)
    running.processes("queue")["actor"].kill()
    running.until("queue is rebuilt")
    running.until("checkpoint of step 4")
    running.processes("trainer/1")["actor"].kill()
    running.until("the run goes on after step")
    running.processes("trainer")["actor"].kill()
    running.until("the run goes on after step", times=2)
    running.look()
    return running.end()


def test_the_run_completes(survived: Run) -> None:
    assert (survived.code, survived.summary["status"]) == (0, "completed"), survived.output


def test_no_sample_is_lost_and_none_trained_twice(survived: Run) -> None:
    found = audit(survived.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * 128, (), ())


def test_the_trainer_goes_on_after_a_checkpoint_and_the_engines_are_not_restarted(
    survived: Run,
) -> None:
    assert "the run goes on after step 0" not in survived.output
    assert re.search("trainer is ejected: .*trainer/1: its process died", survived.output)
    assert survived.output.count("everything is up") == 1
    steps = [line["step"] for line in survived.metrics if "loss/total" in line]
    assert steps == list(range(1, STEPS + 1))


def test_rebuilt_teachers_serve_on_after_the_trainers_death(survived: Run) -> None:
    log = (survived.directory / "run.log").read_text()
    assert [log.count(f"teacher sort/{index} is rebuilt") for index in (0, 1)] == [1, 1]


def test_the_stopped_engine_is_found_by_its_silence(survived: Run) -> None:
    assert "a heartbeat took longer than 20 s" in survived.output


def test_every_rebuild_is_counted(survived: Run) -> None:
    assert survived.summary["rollout/rebuilds"] == 3
    assert max(line.get("teacher/sort/rebuilds", 0) for line in survived.metrics) >= 1


def test_the_log_says_what_became_of_the_teachers_replicas(survived: Run) -> None:
    log = (survived.directory / "run.log").read_text()
    assert "teacher sort/0 is ejected" in log
    assert re.search(r"teacher sort/1 is ejected: .* took longer than", log)
    assert "teacher sort/1 is rebuilt" in log


def test_no_process_is_left_behind(survived: Run) -> None:
    assert survived.left == []
