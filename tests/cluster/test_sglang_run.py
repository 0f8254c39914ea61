"""A run with one teacher in an engine of the run (vLLM) and one on an SGLang server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.test_run import EXAMPLE, Run, Running
from tests.engines import QUICKSTART
from tests.servers import SglangServer

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 20
KEY = "sk-not-to-be-seen"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    model = QUICKSTART / "models" / "teacher-sort"
    server = SglangServer(model, "sorter", KEY, tmp_path_factory.mktemp("server") / "log.txt")
    server.start()
    server.wait()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def served(server: SglangServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    sort = {
        "kind": "endpoint",
        "api": "sglang",
        "urls": [server.url],
        "served_model": "sorter",
        "api_key_env": "SORTER_KEY",
    }
    reverse = {"model": str(EXAMPLE.parent / "quickstart" / "models" / "teacher-reverse")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORTER_KEY", KEY)
        running = Running(
            tmp_path_factory.mktemp("runs") / "served",
            f"teachers={json.dumps({'sort': sort, 'reverse': reverse})}",
            f"train.steps={STEPS}",
            "eval.every=0",
            "log.wandb=off",
        )
        return running.end()


def test_all_samples_of_both_teachers_were_trained(served: Run) -> None:
    assert served.ended(0, "completed"), served.output
    states = ("trained", "in_flight", "dead_lettered")
    assert [served.summary[f"ledger/{s}"] for s in states] == [STEPS * 128, 0, 0]


def test_the_server_answers_its_task_as_its_model_does(served: Run) -> None:
    assert served.summary["eval_teacher/sort/accuracy"] >= 0.97
    assert served.summary["eval_teacher/reverse/accuracy"] >= 0.97


def test_the_student_comes_nearer_to_the_teacher_on_the_server(served: Run) -> None:
    losses = served.values("source/sort/loss")
    assert losses[-1] < 0.7 * losses[0]
