"""A run with rewards whose trainer and teacher take turns with the rollout engine; on CPUs."""

from __future__ import annotations

import pytest

from tests.cluster.test_run import EXAMPLE, ONE_TEACHER, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

COLOCATED = ("rollout.placement=colocated", "rollout.with=train")
TEACHER_TOO = ("teachers.sort.placement=colocated", "teachers.sort.with=rollout")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    running = Running(
        tmp_path_factory.mktemp("runs") / "shared",
        ONE_TEACHER.replace("quickstart/", "../quickstart/"),
        *(*COLOCATED, *TEACHER_TOO, "checkpoint.every=1", "log.wandb=off"),
        example=EXAMPLE.parent / "objectives" / "forward_kl_reward.yaml",
    )
    return running.end()


def test_it_trains_every_sample_with_rewards_and_the_engines_get_every_version(
    shared: Run,
) -> None:
    assert (shared.code, shared.summary["ledger/trained"]) == (0, 6 * 128), shared.output
    assert shared.values("reward/mean")
    assert "step 6, version 3: eval/" in shared.output
    assert shared.overlaps("generate", "score", "step") == []  # never at the same time
