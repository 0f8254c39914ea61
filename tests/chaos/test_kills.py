"""Processes killed and stopped, one after the other, in one real run with images; then its driver.

First the scoring stage and both replicas of the only teacher fail, then the one student replica,
and the queue, which holds the images. Without them little can be trained: the run waits for each
repair, and the next blow comes after it, but for the second teacher replica, whose engine is
stopped and found by its silence meanwhile. At last the driver is killed, and the run is resumed.
"""

from __future__ import annotations

import re

import pytest

from async_opd.accounting.audit import audit
from tests.chaos.test_driver import alive
from tests.cluster.test_run import Run, Running
from tests.examples.test_vision_run import EXAMPLE, drawn

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, BATCH = 16, 64
TEACHER = (
    "teachers={sees: {model: vision/models/teacher-vision, sources: [count, larger, digit, sort], "
    "replicas: 2, health: {timeout_s: 8, probes: 1}}}"
)
CONFIG = (
    *(TEACHER, f"train.steps={STEPS}", f"train.batch_size={BATCH}", "train.ranks=2", "rollout.n=2"),
    *("eval.every=0", "eval.teachers=false", "checkpoint.every=1", "log.wandb=off"),
    "supervision.timeout_s=20",
)


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Run:
    overrides = (*CONFIG, *drawn(tmp_path_factory.mktemp("drawn"), 200, 4))
    directory = tmp_path_factory.mktemp("runs") / "kills"
    running = Running(directory, *overrides, example=EXAMPLE)
    running.until("step 0, version 0")
    running.processes("scorer")["actor"].kill()
    running.processes("rollouter")["actor"].kill()
    running.processes("teacher sees/0")["engine"].kill()
    running.processes("teacher sees/1")["engine"].suspend()
    running.until("scorer is rebuilt")
    running.until("rollouter is rebuilt")
    running.until("teacher sees/0 is rebuilt")
    running.processes("student/0")["engine"].kill()
    running.until("student/0 is rebuilt")
    running.processes("student/0")["actor"].kill()
    running.until("student/0 is rebuilt", times=2)
    running.processes("student/0")["engine"].suspend()
    running.until("student/0 is rebuilt", times=3)
    running.until("teacher sees/1 is rebuilt")
    running.processes("queue")["actor"].kill()
    running.until("queue is rebuilt")
    running.until("checkpoint of step 4")
    running.processes("trainer/1")["actor"].kill()
    running.until("the run goes on after step")
    running.processes("trainer")["actor"].kill()
    running.until("the run goes on after step", times=2)
    running.look()
    running.process.kill()
    running.process.wait(30)
    left, before = alive(running, 30), running.read()
    resumed = Running(directory, *overrides, "--resume", example=EXAMPLE).end()
    return Run(resumed.code, before + resumed.output, directory, left + resumed.left)


def test_the_run_completes(survived: Run) -> None:
    assert (survived.code, survived.summary["status"]) == (0, "completed"), survived.output
    assert "going on after step" in survived.output


def test_no_sample_is_lost_and_none_trained_twice(survived: Run) -> None:
    found = audit(survived.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * BATCH, (), ())


def test_the_trainer_goes_on_after_a_checkpoint_and_the_engines_are_not_restarted(
    survived: Run,
) -> None:
    assert "the run goes on after step 0" not in survived.output
    assert re.search("trainer is ejected: .*trainer/1: its process died", survived.output)
    assert survived.output.count("everything is up") == 2  # and when it was resumed
    steps = [line["step"] for line in survived.metrics if "loss/total" in line]
    assert steps == list(range(1, STEPS + 1))


def test_rebuilt_teachers_serve_on_after_the_trainers_death(survived: Run) -> None:
    log = (survived.directory / "run.log").read_text()
    before, _, after = log.partition("trainer is ejected")
    rebuilt = [f"teacher sees/{index} is rebuilt" for index in (0, 1)]
    assert [(before.count(line), after.count(line)) for line in rebuilt] == [(1, 0)] * 2


def test_the_stopped_engine_is_found_by_its_silence(survived: Run) -> None:
    assert "a heartbeat took longer than 20 s" in survived.output


def test_every_rebuild_is_counted(survived: Run) -> None:
    assert survived.output.count("student/0 is rebuilt") == 3
    assert max(line.get("teacher/sees/rebuilds", 0) for line in survived.metrics) >= 1


def test_the_log_says_what_became_of_the_teachers_replicas(survived: Run) -> None:
    log = (survived.directory / "run.log").read_text()
    assert "teacher sees/0 is ejected" in log
    assert re.search(r"teacher sees/1 is ejected: .* took longer than", log)
    assert "teacher sees/1 is rebuilt" in log


def test_images_were_in_flight(survived: Run) -> None:
    assert max(line.get("queue/images", 0) for line in survived.metrics) > 0


def test_no_process_is_left_behind(survived: Run) -> None:
    assert survived.left == []
