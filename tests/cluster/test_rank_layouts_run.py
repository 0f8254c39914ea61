"""Whole runs whose trainer has several ranks: every way in which ranks share one student."""

from __future__ import annotations

import subprocess
import sys

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_run import BOUND_S, ONE_TEACHER, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAYOUTS = {
    "rows_and_shards_2x2": (ONE_TEACHER, "train.ranks=4", "train.context_parallel=2"),
    "full_vocabulary_on_2": ("train.ranks=2", "loss={kind: forward_kl, support: full_vocab}"),
}

LOG = ("log.wandb=off", "log.replay=true")


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "ranks"
    return Running(folder, *request.param, "sync.verify_every=1", *LOG).end()


def test_it_trains_every_sample_once_and_leaves_no_process_behind(done: Run) -> None:
    assert done.ended(0, "completed"), done.output
    found = audit(done.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (6 * 128, (), ())


def test_the_student_comes_nearer_to_its_teachers(done: Run) -> None:
    losses = done.values("loss/distillation")
    assert losses[-1] < losses[0]


def test_engines_sample_from_what_the_ranks_trained(done: Run) -> None:
    checked = [line for line in done.metrics if "sync/freshness_nats" in line]
    assert [line["sync/wrong_weights"] for line in checked] == [0.0, 0.0]


def test_its_last_step_has_the_same_bits_when_as_many_ranks_compute_it_again(
    done: Run,
) -> None:
    command = [sys.executable, "-m", "async_opd", "replay", str(done.directory), "--step", "6"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "step 6 is bit-equal" in found.stdout
