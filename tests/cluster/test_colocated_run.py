"""A run whose two teachers take turns with the trainer; the student's own top-k is scored.

tests/cluster/test_colocated_trainer_run.py has a teacher that takes turns with the engine.
"""

from __future__ import annotations

import pytest

from tests.cluster.test_run import EXAMPLE, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "shared",
        *(f"teachers.{name}.placement=colocated" for name in ("sort", "reverse")),
        *(f"teachers.{name}.with=train" for name in ("sort", "reverse")),
        *("eval.every=0", "log.wandb=off"),
        example=EXAMPLE.parent / "objectives" / "reverse_kl_student_topk.yaml",
    )
    return running.end()


def test_it_trains_every_sample_and_teachers_answer_in_their_turns(shared: Run) -> None:
    assert (shared.code, shared.summary["ledger/trained"]) == (0, 6 * 128), shared.output
    for source in ("sort", "reverse"):
        assert shared.summary[f"eval_teacher/{source}/accuracy"] >= 0.97
    assert shared.overlaps("step", "score") == []  # never at the same time
