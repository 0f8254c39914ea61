"""Graders in separate processes: whatever one does costs its response only."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import StageError
from async_opd.core.row import Row
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import GradeError
from tests.processes.test_signals import is_gone

MODULE = """
import os, re, signal, subprocess, threading, time

def half(response, row):
    return 0.5

def pid(response, row):
    return os.getpid() / 2**32

def by_name(response, row):
    if response == "hang":
        threading.Event().wait()
    if response == "lock":
        re.match(r"(a+)+b", "a" * 60)  # for hours, and no other thread runs meanwhile
    if response == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "leave":
        os._exit(3)
    if response == "raise":
        raise ZeroDivisionError("oh")
    return 1.0

def pair(response, row):
    return 0.5, response * 3000

def slow(response, row):
    time.sleep(0.8)
    return 1.0

def starts_one(response, row):
    child = subprocess.Popen(["sleep", "60"])
    with open(row.fields["told"], "w") as file:
        file.write(str(child.pid))
    threading.Event().wait()
"""


def row(answer: str = "x", **fields: str) -> Row:
    return Row("0:7", "a", "p", answer, dict(fields))


class Made:
    """Builds graders of a module of the test's own, and ends them."""

    def __init__(self) -> None:
        self.graders: list[Graders] = []

    def __call__(self, function: str, timeout_s: float = 60, processes: int = 2) -> Graders:
        self.graders.append(
            Graders(
                GraderSpec(function, GradingConfig(timeout_s=timeout_s, processes=processes), 60)
            )
        )
        return self.graders[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "users_graders.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
async def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Made]:
    monkeypatch.syspath_prepend(str(folder))
    builder = Made()
    yield builder
    for graders in builder.graders:
        graders.close()


async def test_responses_get_their_graders_number_from_one_other_process(made: Made) -> None:
    graders = made("users_graders:pid")
    (found,) = {await graders.grade("x", row()) for _ in range(3)}
    assert found not in (0, os.getpid() / 2**32)
    pair = await made("users_graders:pair").grade("x", row())
    assert (pair, pair.answer) == (0.5, "x" * 2000)  # the extracted answer is cut


async def test_whatever_a_grader_does_the_next_response_is_graded(made: Made) -> None:
    graders = made("users_graders:by_name", processes=1)
    for how, fault in (
        ("raise", "failed on row 0:7: ZeroDivisionError: oh"),
        ("die", r"ended its process \(signal 11\) on row 0:7"),
        ("leave", r"ended its process \(exit code 3\) on row 0:7"),
    ):
        with pytest.raises(GradeError, match=fault):
            await graders.grade(how, row())
        assert await graders.grade("x", row()) == 1.0


@pytest.mark.slow
async def test_no_more_are_started_than_are_allowed(made: Made) -> None:
    graders = made("users_graders:pid", processes=2)
    found = await asyncio.gather(*(graders.grade("x", row()) for _ in range(12)))
    assert len(set(found)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "lock"])
async def test_after_a_grader_that_hangs_the_next_response_is_graded(made: Made, how: str) -> None:
    graders = made("users_graders:by_name", timeout_s=3, processes=1)
    with pytest.raises(GradeError, match=r"by_name took longer than 3 s on row 0:7"):
        await graders.grade(how, row())
    assert await graders.grade("x", row()) == 1.0


async def test_a_process_that_ended_while_it_had_no_work_costs_nothing(made: Made) -> None:
    graders = made("users_graders:pid")
    ended = round(await graders.grade("x", row()) * 2**32)
    os.kill(ended, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    assert await graders.grade("x", row()) != ended / 2**32


@pytest.mark.slow
async def test_waiting_for_a_process_counts_against_nobody(made: Made) -> None:
    graders = made("users_graders:slow", timeout_s=4, processes=1)
    found = await asyncio.gather(*(graders.grade("x", row()) for _ in range(6)))
    assert found == [1.0] * 6


@pytest.mark.slow
async def test_what_a_late_grader_had_started_is_ended_with_it(made: Made, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with pytest.raises(GradeError, match="took longer"):
        await made("users_graders:starts_one", timeout_s=3).grade("x", row(told=str(told)))
    assert is_gone(int(told.read_text()))


async def test_a_cancelled_call_leaves_no_process_that_is_busy(made: Made) -> None:
    graders = made("users_graders:by_name", processes=1)
    assert await graders.grade("x", row()) == 1.0
    (process,) = graders._idle
    asked = asyncio.create_task(graders.grade("hang", row()))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asked), 0.2)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert is_gone(process.process.pid)


async def test_a_grader_that_cannot_be_loaded_in_its_process_is_an_error(made: Made) -> None:
    with pytest.raises(StageError, match=r"no_such:f cannot be loaded: ModuleNotFoundError"):
        await made("no_such:f").grade("x", row())


STARTER = """
import asyncio, sys
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.core.row import Row

async def main():
    graders = Graders(GraderSpec("users_graders:by_name", GradingConfig(processes=1), 60))
    await graders.grade("x", Row("0:7", "a", "p", "x", {}))
    print(graders._idle[0].process.pid, flush=True)
    await graders.grade("lock", Row("0:7", "a", "p", "x", {}))

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_busy_grader_ends_when_its_starter_is_killed(folder: Path) -> None:
    path = os.pathsep.join(filter(None, [str(folder), *sys.path]))
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert starter.stdout is not None
    grader = int(starter.stdout.readline())
    starter.kill()
    starter.wait(30)
    assert is_gone(grader)
