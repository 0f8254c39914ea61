"""Processes killed while images are in flight, then the driver, and the run resumed.

The teacher that sees, the student, the queue, which holds the images, and a rank of the trainer
fail one after the other. Without any of them nothing can be trained: each kill comes after the last
repair.
"""

from __future__ import annotations

import json

import pytest

from async_opd.accounting.audit import Audit, audit
from tests.chaos.test_driver import alive
from tests.cluster.test_run import Run, Running
from tests.examples.test_vision_run import EXAMPLE, PICTURED, drawn

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, BATCH = 40, 32


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = drawn(tmp_path_factory.mktemp("drawn"), 100, 4)
    return [
        *data,
        *(f"train.steps={STEPS}", f"train.batch_size={BATCH}", "train.ranks=2", "rollout.n=2"),
        *("eval.every=0", "eval.teachers=false", "checkpoint.every=1", "log.wandb=off"),
        *("supervision.heartbeat_s=2", "supervision.timeout_s=20"),
    ]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, overrides: list[str]) -> Running:
    running = Running(tmp_path_factory.mktemp("runs") / "vision", *overrides, example=EXAMPLE)
    running.until("step 0, version 0")
    running.processes("teacher sees/0")["engine"].kill()
    running.until("teacher sees/0 is rebuilt")
    running.processes("student/0")["engine"].kill()
    running.until("student/0 is rebuilt")
    running.processes("queue")["actor"].kill()
    running.until("queue is rebuilt")
    running.until("checkpoint of step 4")
    running.processes("trainer/1")["actor"].kill()
    running.until("the run goes on after step")
    running.until("checkpoint of step 12")
    running.look()
    running.process.kill()
    running.process.wait(30)
    return running


@pytest.fixture(scope="module")
def resumed(killed: Running, overrides: list[str]) -> Run:
    assert alive(killed, 30) == []
    return Running(killed.directory, *overrides, "--resume", example=EXAMPLE).end()


@pytest.fixture(scope="module")
def found(resumed: Run) -> Audit:
    return audit(resumed.directory)


def test_the_resumed_run_completes(resumed: Run) -> None:
    assert (resumed.code, resumed.summary["status"]) == (0, "completed"), resumed.output
    assert "going on after step" in resumed.output


def test_no_sample_is_lost_and_none_trained_twice(found: Audit) -> None:
    assert (found.lost, found.duplicated, len(found.trained)) == ((), (), STEPS * BATCH)


def test_no_sample_is_a_dead_letter(resumed: Run) -> None:
    assert resumed.summary["ledger/dead"] == 0


def test_images_were_in_flight_when_the_driver_was_killed(resumed: Run) -> None:
    ledger = (resumed.directory / "ledger.jsonl").read_text()
    assert all(name in ledger for name in PICTURED), json.loads(ledger.splitlines()[0])


def test_no_process_is_left_behind(resumed: Run) -> None:
    assert resumed.left == []
