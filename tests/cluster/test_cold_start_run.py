"""A run that begins with supervised steps on its teachers' answers.

Those on the rows' own answers differ in where they come from: tests/test_cold_start.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_run import EXAMPLE, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 50


def sorting(folder: Path) -> list[str]:
    """Overrides for the quickstart's prompts and teacher of one of its tasks."""
    for part in ("train", "eval"):
        rows = (EXAMPLE.parent / "quickstart" / "data" / f"{part}.jsonl").read_text().splitlines()
        chosen = [row for row in rows if '"data_source": "sort"' in row]
        (folder / f"{part}.jsonl").write_text("\n".join(chosen))
    teacher = "teachers={sort: {model: quickstart/models/teacher-sort}}"
    return [teacher, *(f"data.{part}={folder / part}.jsonl" for part in ("train", "eval"))]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    running = Running(
        folder / "cold",
        *sorting(folder),
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
    """The student's own first weights answer 16 % of the prompts correctly."""
    assert done.summary["eval_initial/sort/accuracy"] > 0.5


def test_a_checkpoint_has_its_weights_and_no_sample_of_it_is_in_the_ledger(done: Run) -> None:
    assert (done.directory / "checkpoints" / "step_0").is_dir()
    assert len(audit(done.directory).trained) == 2 * 128
