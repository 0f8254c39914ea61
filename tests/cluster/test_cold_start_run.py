"""A run that begins with supervised steps on its teachers' answers.

Those on the rows' own answers differ in where they come from: tests/test_cold_start.py.
"""

from __future__ import annotations

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_run import Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 60


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "cold",
        f"cold_start={{steps: {STEPS}, answers: teacher, temperature: 0, lr: 3e-3}}",
        "train.steps=2",
        "eval.every=0",
        "eval.teachers=false",
        "checkpoint.keep=3",
    )
    running.until("everything is up")
    running.look()
    return running.end()


def test_the_cross_entropy_falls(done: Run) -> None:
    assert done.ended(0, "completed"), done.output
    losses = done.values("cold_start/loss")
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_the_replicas_answer_with_the_weights_of_the_cold_start(done: Run) -> None:
    """The student's own first weights answer 22 % and 16 % of the prompts correctly."""
    found = [done.summary[f"eval_initial/{source}/accuracy"] for source in ("sort", "reverse")]
    assert max(found) > 0.5, found  # one task is learned before the other


def test_a_checkpoint_has_its_weights_and_no_sample_of_it_is_in_the_ledger(done: Run) -> None:
    assert (done.directory / "checkpoints" / "step_0").is_dir()
    assert len(audit(done.directory).trained) == 2 * 128
