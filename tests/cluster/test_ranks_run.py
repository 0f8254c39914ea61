"""A run whose trainer has four ranks: two share each row, two the rows, all the weights.

Its teachers send their hidden states for the full vocabulary. Runs of two ranks with top-k scores
are in tests/chaos/.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_run import BOUND_S, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Running(
        tmp_path_factory.mktemp("runs") / "ranks",
        "train.ranks=4",
        "train.context_parallel=2",
        "loss={kind: forward_kl, support: full_vocab}",
        "sync.verify_every=1",
        "log.wandb=off",
        "log.replay=true",
    ).end()


def test_it_trains_every_sample_once_and_engines_sample_from_the_ranks_weights(done: Run) -> None:
    assert done.ended(0, "completed"), done.output
    found = audit(done.directory)
    assert (len(found.trained), found.lost, found.duplicated) == (6 * 128, (), ())
    losses = done.values("loss/distillation")
    assert losses[-1] < losses[0]
    checked = [line for line in done.metrics if "sync/freshness_nats" in line]
    assert [line["sync/wrong_weights"] for line in checked] == [0.0, 0.0]


def test_its_last_step_has_the_same_bits_when_as_many_ranks_compute_it_again(
    done: Run,
) -> None:
    command = [sys.executable, "-m", "async_opd", "replay", str(done.directory), "--step", "6"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "step 6 is bit-equal" in found.stdout
