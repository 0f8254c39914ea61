"""examples/vision.yaml as a user runs it: two teachers, one of which sees, real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_run import Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, MAKE = EXAMPLES / "vision.yaml", EXAMPLES / "vision" / "make.py"
PICTURED = ("count", "larger", "digit")
SOURCES = (*PICTURED, "sort")
STEPS, BATCH = 8, 32
WHOLE = ["train.steps=360", "async.sync_steps=4", "eval.every=30", "eval.max_prompts=null"]
FEW = [
    *(f"train.steps={STEPS}", f"train.batch_size={BATCH}", "eval.every=0", "eval.max_prompts=16"),
    *("train.freeze=[vision_tower]", "sync.verify_every=1"),
]
BOUND_S = 30 * 60
"""The whole run takes 8 to 13 minutes (docs/vision.md), and longer while the machine is slow."""


def drawn(folder: Path, train: int, evaluation: int) -> list[str]:
    """Overrides that name files with so many rows of each task."""
    sizes = ["--train", str(train), "--eval", str(evaluation)]
    command = [sys.executable, str(MAKE), "--out", str(folder), *sizes]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return [f"data.{part}={folder / 'data' / part}.parquet" for part in ("train", "eval")]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("few")
    data = drawn(folder, 100, 8)
    return Running(folder / "run", *FEW, *data, "log.wandb=off", example=EXAMPLE).end()


def test_eight_steps_train_every_sample_and_lose_none(few: Run) -> None:
    assert (few.code, few.summary["ledger/trained"]) == (0, STEPS * BATCH), few.output
    assert few.left == []
    for teacher in ("sees", "reads"):  # each scores samples of its sources
        assert sum(line.get(f"teacher/{teacher}/tokens_per_s", 0) for line in few.metrics) > 0
    for source in SOURCES:
        assert few.summary[f"eval_teacher/{source}/accuracy"] >= 0.9


def test_a_student_whose_tower_is_frozen_is_fresh_after_every_sync(few: Run) -> None:
    synced = [line for line in few.metrics if "sync/freshness_image_nats" in line]
    assert len(synced) >= 3, "a matrix that did not change shows at the second comparison"
    assert not any(line.get("sync/wrong_weights") for line in few.metrics)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("whole")
    data = drawn(folder, 2000, 128)
    return Running(folder / "run", *WHOLE, *data, "log.wandb=off", example=EXAMPLE).end(BOUND_S)


@pytest.mark.whole
def test_the_student_learns_from_both_teachers(whole: Run) -> None:
    assert whole.code == 0, whole.output
    for source in SOURCES:
        before, after, teacher = (
            whole.summary[f"{when}/{source}/accuracy"]
            for when in ("eval_initial", "eval", "eval_teacher")
        )
        assert before <= 0.4 * teacher, source
        assert after >= 0.9 * teacher, source
