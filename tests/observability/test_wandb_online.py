"""wandb online: its real client and its own process, against a server on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import wandb_rows
from tests.world.wandb_server import PATIENCE_S, HostedRun, WandbServer

pytestmark = pytest.mark.slow

IN_A_SECOND = ("TRANSMIT_INTERVAL", "RETRY_WAIT_MIN_SECONDS", "RETRY_WAIT_MAX_SECONDS")
"""Waits of wandb's own process, which are 15 s and more."""
PART = """
import sys
from pathlib import Path
from async_opd.observability import wandb_sink
from async_opd.observability.run_log import RunLog
from tests.world.config import run_config

wandb_sink.INIT_TIMEOUT_S = float(sys.argv[3])
config = run_config(log={"console": "off", "wandb": "online"})
before = {} if sys.argv[2] == "resumed" else None
with RunLog(config, Path(sys.argv[1]), before=before) as log:
    for step in map(int, sys.stdin):
        log.log(step, {"loss/total": 1 / step})
    print(log.finish("completed"))
"""
"""A part of a run, which logs the steps that it reads."""


@dataclass
class Part:
    """The process of a part."""

    process: subprocess.Popen[str]

    def log(self, steps: Sequence[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.writelines(f"{step}\n" for step in steps)
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Its exit code, and its output."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out.strip()


@contextmanager
def part(url: str, folder: Path, how: str = "new", init_s: float = 60) -> Iterator[Part]:
    """A part with a login at the server."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": "k" * 40, "HOME": str(folder.parent)}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    env |= {f"WANDB__FILE_STREAM_{name}": "1" for name in IN_A_SECOND}
    process = subprocess.Popen(
        [sys.executable, "-c", PART, str(folder), how, str(init_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        yield Part(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer().serving() as serving:
        yield serving


def the_run(server: WandbServer) -> HostedRun:
    """The only one."""
    (run,) = server.runs.values()
    return run


def steps(server: WandbServer) -> list[int]:
    return [int(row["step"]) for run in server.runs.values() for row in run.rows]


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def test_the_first_row_comes_while_the_run_goes_on_and_all_come_in_order(
    server: WandbServer, tmp_path: Path
) -> None:
    with part(server.url, tmp_path / "run") as one:
        one.log([1, 2])
        server.until(lambda: steps(server)[:1] == [1])
        assert not the_run(server).complete
        one.log(range(3, 30))
        assert one.end() == (0, "completed")
    assert steps(server) == list(range(1, 30))
    assert [row["loss/total"] for row in the_run(server).rows] == [1 / at for at in range(1, 30)]
    assert the_run(server).complete
    assert summary(tmp_path / "run")["notes"] == {}


def test_a_server_that_is_away_for_a_while_lacks_no_row(
    server: WandbServer, tmp_path: Path
) -> None:
    with part(server.url, tmp_path / "run") as one:
        one.log(range(1, 6))
        server.until(lambda: len(steps(server)) >= 1)
        server.away = True
        one.log(range(6, 20))
        server.until(lambda: server.refused >= 2)
        server.away = False
        one.log(range(20, 25))
        assert one.end() == (0, "completed")
    assert steps(server) == list(range(1, 25))
    assert summary(tmp_path / "run")["log/sink_failures"] == 0


def test_a_resume_goes_on_in_the_same_run_with_each_step_once(
    server: WandbServer, tmp_path: Path
) -> None:
    for how, logged in (("new", [1, 2, 3]), ("resumed", [3, 4, 5])):
        with part(server.url, tmp_path / "run", how) as one:
            one.log(logged)
            assert one.end() == (0, "completed")
    assert list(server.runs) == [json.loads((tmp_path / "run/wandb_run.json").read_text())["id"]]
    assert steps(server) == [1, 2, 3, 4, 5]
    assert [row["_step"] for row in the_run(server).rows] == [0, 1, 2, 3, 4]


def test_a_run_whose_server_does_not_answer_completes_offline_and_its_summary_says_so(
    server: WandbServer, tmp_path: Path
) -> None:
    server.away = True
    with part(server.url, tmp_path / "run", init_s=10) as one:
        one.log([1, 2, 3])
        assert one.end() == (0, "completed")
    found = summary(tmp_path / "run")
    assert (found["status"], found["error"]) == ("completed", None)
    assert "this run is logged offline; wandb sync uploads" in found["notes"]["wandb"]
    assert found["notes"]["wandb"] in (tmp_path / "run" / "run.log").read_text()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert [row["step"] for row in wandb_rows.rows(file)] == [1, 2, 3]
