"""The trainer of a real run is killed, and goes on from the weights of its only student replica."""

from __future__ import annotations

import json
import re
import time

import pytest

from async_opd.accounting.audit import audit
from async_opd.checkpoint.store import Checkpoints
from tests.cluster.test_run import BOUND_S, ONE_TEACHER, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, BATCH, SYNC_STEPS = 27, 32, 9
CONFIG = (
    *(ONE_TEACHER, f"train.steps={STEPS}", f"train.batch_size={BATCH}", "eval.every=0"),
    *("eval.before=false", "eval.teachers=false", "log.wandb=off", "checkpoint.every=0"),
    f"async.sync_steps={SYNC_STEPS}",  # the kill is to end before the push of the next version
    *("cluster.trainer_recovery=replica", "sync.verify_every=1", "rollout.engine.dtype=bfloat16"),
)


def until_version(running: Running, version: int) -> None:
    """Waits for a row that is written when all replicas have this version."""
    deadline = time.monotonic() + BOUND_S
    while version not in Run(0, "", running.directory, []).values("sync/version"):
        assert running.process.poll() is None, running.read()
        assert time.monotonic() < deadline, running.read()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(tmp_path_factory.mktemp("runs") / "recovered", *CONFIG)
    running.until("everything is up")
    trainer = running.processes("trainer")["actor"]
    until_version(running, 1)
    trainer.kill()
    return running.end()


def test_the_run_goes_on_after_a_version_that_no_checkpoint_has(survived: Run) -> None:
    assert survived.ended(0, "completed"), survived.output
    log = (survived.directory / "run.log").read_text()
    (found,) = re.findall(
        r"the trainer has the weights of version (\d) from student/0 \(bfloat16\), .* (\w{16})\n",
        log,
    )
    step = SYNC_STEPS * int(found[0])
    assert f"the run goes on after step {step}" in log
    assert step >= SYNC_STEPS
    lineage = json.loads((survived.directory / f"checkpoints/step_{step}/cut.json").read_text())[
        "lineage"
    ]
    assert (lineage[-1]["id"], lineage[-1]["after"]) == (found[1], step)
    assert survived.summary["checkpoint/from_replica"] == 1


def test_each_sample_is_trained_once(survived: Run) -> None:
    found = audit(survived.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (STEPS * BATCH, (), ())
    rows = [line["step"] for line in survived.metrics if "loss/total" in line]
    assert rows == list(range(1, STEPS + 1))


def test_engines_had_the_trainers_weights_before_and_after(survived: Run) -> None:
    assert set(survived.values("sync/wrong_weights")) == {0}
    assert Checkpoints(survived.directory / "checkpoints", 9).newest(pytest.fail) is not None
