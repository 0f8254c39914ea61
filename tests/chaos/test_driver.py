"""kill -9 of the driver between two checkpoints, and its run resumed, against an undisturbed run.

Both are exactly on-policy and reproducible, so that their weights can be compared bit for bit. The
teacher is the student as it was up to two versions ago, and gets another prompt: a resumed run
with any other weights would learn other ones. The undisturbed run has its checkpoints on a
disk that is too small for two, where that can be had; the other one is in wandb, too.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from async_opd.accounting.audit import Audit, audit
from async_opd.checkpoint.store import Checkpoints
from async_opd.observability.logged_run import LoggedRun
from tests.cluster.test_run import Run, Running
from tests.wandb_rows import rows

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, BATCH = 10, 8
SMALL_DISK_MIB = 9  # one checkpoint has 7
CONFIG = (
    "teachers={easier: {kind: self, refresh_every: 3, sources: [sort, reverse], "
    "prompt_template: 'sort {answer}=', engine: {max_num_seqs: 1}}}",
    "data.eval=[]",
    "rollout={n: 2, max_tokens: 8, reproducible: true, concurrency: 1, engine: {max_num_seqs: 1}}",
    f"train={{steps: {STEPS}, batch_size: {BATCH}, lr: 1e-3, warmup_steps: 2}}",
    "async={staleness_threshold: 0, sync_steps: 1}",
    "checkpoint.every=2",
)
WANDB, NO_WANDB = "log.wandb=offline", "log.wandb=off"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    disk = directory / "checkpoints"
    disk.mkdir(parents=True)
    size = f"size={SMALL_DISK_MIB}m"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], check=False)
    running = Running(directory, *CONFIG, NO_WANDB)
    running.until("everything is up")
    yield running.end()
    if mount.returncode == 0:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Running:
    """A driver killed after a checkpoint, and everything that it had started."""
    running = Running(tmp_path_factory.mktemp("runs") / "killed", *CONFIG, WANDB)
    running.until("checkpoint of step 4")
    running.look()
    running.process.kill()
    running.process.wait(30)
    return running


def alive(running: Running, timeout_s: float) -> list[str]:
    """The processes of its family that still live after a time."""
    family = [p for p in running.family.values() if p.is_running()]
    _, left = psutil.wait_procs(family, timeout=timeout_s)
    return [_name(process) for process in left if process.is_running()]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.Error:
        return "gone"


@pytest.fixture(scope="module")
def given(killed: Running) -> LoggedRun:
    """The data that wandb had when the driver was killed."""
    return LoggedRun.of(killed.directory, "wandb")


@pytest.fixture(scope="module")
def resumed(killed: Running, given: LoggedRun) -> Run:
    running = Running(killed.directory, *CONFIG, WANDB, "--resume")
    running.until("everything is up")
    return running.end()


def found(run: Run) -> Audit:
    return audit(run.directory)


def test_no_process_outlives_a_killed_driver(killed: Running) -> None:
    assert alive(killed, 30) == []


def test_its_run_completes_when_it_is_resumed(resumed: Run) -> None:
    assert (resumed.code, resumed.summary["status"]) == (0, "completed"), resumed.output
    assert "going on after step" in resumed.output


def test_nothing_is_lost_and_nothing_trained_twice(resumed: Run) -> None:
    seen = found(resumed)
    assert (seen.lost, seen.duplicated, len(seen.trained)) == ((), (), STEPS * BATCH)


def test_every_step_is_in_the_metrics_once(resumed: Run) -> None:
    steps = [line["step"] for line in resumed.metrics if "loss/total" in line]
    assert steps == list(range(1, STEPS + 1))


def test_it_has_trained_what_an_undisturbed_run_trains(resumed: Run, undisturbed: Run) -> None:
    assert Counter(found(resumed).trained) == Counter(found(undisturbed).trained)


def test_its_weights_are_those_of_an_undisturbed_run_bit_for_bit(
    resumed: Run, undisturbed: Run
) -> None:
    one, two = (run.directory / "model" / "model.safetensors" for run in (resumed, undisturbed))
    assert one.read_bytes() == two.read_bytes()


def test_it_goes_on_in_the_same_wandb_run(resumed: Run, given: LoggedRun) -> None:
    files = sorted((resumed.directory / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{given.id}"] * 2
    before, after = ([(row["_step"], row["step"]) for row in rows(file)] for file in files)
    assert before == [(step - 1, step) for step in range(1, len(before) + 1)]
    assert after == [(step - 1, step) for step in range(given.step + 1, STEPS + 1)]


def test_a_full_disk_costs_checkpoints_and_not_the_run(undisturbed: Run) -> None:
    if not (undisturbed.directory / "checkpoints").is_mount():
        pytest.skip("no separate file system for the checkpoints: mount is not permitted")
    assert undisturbed.code == 0, undisturbed.output
    assert undisturbed.summary["checkpoint/failures"] > 0
    assert "No space left on device" in undisturbed.output
    assert Checkpoints(undisturbed.directory / "checkpoints", 2).newest(pytest.fail) is not None
