"""The head of a run's cluster is killed, together with a process that the run needs.

Ray would end the driver after 60 s, without a line, a checkpoint or a summary.
"""

from __future__ import annotations

import signal

import psutil
import pytest

from async_opd.checkpoint.store import Checkpoints
from tests.cluster.test_run import Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

SIMULATED = [
    "train={steps: 100000, batch_size: 16}",
    "eval={every: 0, before: false, teachers: false}",
    "sync={verify_every: 0}",
    "rollout.n=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("runs") / "headless"
    running = Running(directory, *SIMULATED, program=("tests.cluster.simulated",))
    running.until("checkpoint of step")
    ended = ("gcs_server", "ray::MessageQueue")
    found = [one for one in running.family.values() if any(name in words(one) for name in ended)]
    assert len(found) == len(ended)
    for process in found:
        process.send_signal(signal.SIGKILL)
    return running.end()


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_the_loss_is_noticed_at_once_and_the_last_step_has_a_checkpoint(run: Run) -> None:
    assert run.ended(1, "failed"), run.output
    assert "Ray's head has not answered for" in run.summary["error"]
    log = (run.directory / "run.log").read_text()
    assert log.index("Ray's head does not answer") < log.index("the run has failed")
    assert Checkpoints(run.directory / "checkpoints", 2).steps()[-1] == run.summary["steps"]
