"""A replica killed in the middle of a broadcast, another one stopped for ever before the next.

Each sync is made again without them, and the one that is left goes on.
"""

from __future__ import annotations

import re
import time

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_run import BOUND_S, ONE_TEACHER, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 20


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    running = Running(
        folder / "sync",
        "rollout.replicas=3",
        ONE_TEACHER,
        f"train.steps={STEPS}",
        "async.sync_steps=1",
        "async.staleness_threshold=3",  # enough samples beside those that the stopped one holds
        "eval.every=0",
        "eval.teachers=false",
        "supervision.timeout_s=3600",  # no heartbeat ejects the stopped one
        "sync.timeout_s=20",
        "sync.verify_every=0",  # a replica may be stopped while it scores held rows, too
        "sync.chunk_mib=1",
        "log.wandb=off",
        program=("tests.chaos.halfway", str(folder)),
    )
    running.until("step 0, version 0")
    engine = running.processes("student/2")["engine"]
    (folder / "armed").touch()
    running.until_there(folder / "halfway")
    engine.kill()
    # Only then: who sends to it meanwhile may hand its bytes to a socket that is not closed yet,
    # and would find nothing wrong.
    running.until("student/2 is ejected")
    before = syncs(running)
    (folder / "go").touch()
    until_synced(running, before)  # else the stop would meet the sync that the kill has broken off
    running.processes("student/1")["engine"].suspend()
    running.until("student/1 is ejected")
    running.look()
    return running.end()


def syncs(running: Running) -> int:
    """How many syncs are in the metrics."""
    return (running.directory / "metrics.jsonl").read_text().count('"sync/rounds"')


def until_synced(running: Running, before: int) -> None:
    """Waits until more syncs than ``before`` are in the metrics.

    Not for one of two rounds: on the replica's death the others may have all their bytes already.
    """
    deadline = time.monotonic() + BOUND_S
    while syncs(running) <= before:
        assert running.process.poll() is None, running.read()
        assert time.monotonic() < deadline, running.read()
        time.sleep(0.02)


def test_the_kill_in_the_middle_of_a_broadcast_is_no_matter_of_time(survived: Run) -> None:
    log = (survived.directory / "run.log").read_text()
    (line,) = (line for line in log.splitlines() if "student/2 is ejected" in line)
    assert "took longer" not in line


def test_who_was_not_killed_generates_on(survived: Run) -> None:
    assert "student/0 is ejected" not in survived.output


def test_the_sync_names_who_did_not_answer(survived: Run) -> None:
    log = (survived.directory / "run.log").read_text()
    (line,) = (line for line in log.splitlines() if "student/1 is ejected" in line)
    assert re.search(r"student/0…[12] took longer than 20(\.\d+)? s", line)  # 2: it is back


def test_the_sync_is_made_again_and_the_run_completes(survived: Run) -> None:
    assert (survived.code, survived.summary["status"]) == (0, "completed"), survived.output
    assert max(line.get("sync/rounds", 0) for line in survived.metrics) >= 2


def test_no_sample_is_lost_and_none_trained_twice(survived: Run) -> None:
    found = audit(survived.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * 128, (), ())


def test_no_process_is_left_behind_not_even_the_stopped_one(survived: Run) -> None:
    assert survived.left == []
