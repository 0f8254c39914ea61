"""A run whose teacher is a vLLM server, which gets kill -9 and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.test_run import EXAMPLE, Run, Running
from tests.servers import VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 8
KEY = "sk-not-to-be-seen"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model = EXAMPLE.parent / "quickstart" / "models" / "teacher-sort"
    server = VllmServer(model, "sorter", KEY, tmp_path_factory.mktemp("server") / "log.txt")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def served(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    teacher = {
        "kind": "endpoint",
        "urls": [server.url],
        "served_model": "sorter",
        "api_key_env": "SORTER_KEY",
        "sources": ["sort", "reverse"],
        "health": {"timeout_s": 200},
    }
    server.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORTER_KEY", KEY)
        running = Running(
            tmp_path_factory.mktemp("runs") / "served",
            f"teachers={json.dumps({'sort': teacher})}",
            f"train.steps={STEPS}",
            "eval.every=0",
            "log.wandb=off",
        )
    running.until("step 0, version 0: eval_teacher")
    server.kill()
    running.until("teacher sort/0 is ejected")
    server.start()
    return running.end()


def test_the_server_answers_its_task_as_its_model_does(served: Run) -> None:
    assert (served.code, served.summary["status"]) == (0, "completed"), served.output
    assert served.summary["eval_teacher/sort/accuracy"] >= 0.97
    assert "kind: endpoint" in (served.directory / "config.yaml").read_text()


def test_all_samples_were_trained_although_the_server_was_killed(served: Run) -> None:
    states = ("trained", "in_flight", "dead_lettered")
    assert [served.summary[f"ledger/{s}"] for s in states] == [STEPS * 128, 0, 0]
    log = (served.directory / "run.log").read_text()
    assert "teacher sort/0 is ejected" in log
    assert "teacher sort/0 serves again" in log


def test_the_key_is_neither_in_a_file_of_the_run_nor_in_its_output(served: Run) -> None:
    files = [path for path in served.directory.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in served.output
