"""A run with rewards whose trainer and teacher take turns with the rollout engine; on CPUs."""

from __future__ import annotations

import itertools
import json

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


def test_it_trains_every_sample(shared: Run) -> None:
    assert (shared.code, shared.summary["ledger/trained"]) == (0, 6 * 128), shared.output


def test_its_answers_have_rewards(shared: Run) -> None:
    assert any("reward/mean" in line for line in shared.metrics)


def test_the_engines_get_every_version(shared: Run) -> None:
    assert "step 6, version 3: eval/" in shared.output


def test_what_shares_the_gpus_never_works_at_the_same_time(shared: Run) -> None:
    names = {"generate", "score", "step"}
    events = json.loads((shared.directory / "trace.json").read_text())["traceEvents"]
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event["name"] in names
    )
    late = [
        (one, two) for one, two in itertools.pairwise(work) if one[2] != two[2] and two[0] < one[1]
    ]
    assert {name for _, _, name in work} == names
    assert late == []
