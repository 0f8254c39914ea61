"""The checkpoint of a run that ends before its time, how long it may take; and the best one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd import run as module
from async_opd.checks.preflight import Inputs
from async_opd.cluster.watching import RECONNECT
from async_opd.core.errors import HeadLost, ProcessDied, StageError
from async_opd.prepare import Prepared
from tests.checkpoint.test_store import ROWS, written
from tests.world.config import run_config
from tests.world.training import FakeTraining, SavingTrainer

BROKEN = StageError("guardrail", "responses run away")
LOST = HeadLost("cluster", "Ray's head has not answered for 20 s")
DIED = ProcessDied("trainer", "its process died")
SIGNAL = asyncio.CancelledError()


class Writing:
    """A checkpoint that is written after so many seconds, or never; a signal may come first."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.begun = self.kept = False
        self.signalled: list[asyncio.Task[Any]] = []

    async def __call__(self) -> None:
        self.begun = True
        for work in self.signalled:
            work.cancel()
        await asyncio.sleep(self.seconds)
        self.kept = True


def ended(
    training: type[FakeTraining], folder: Path, writing: Writing, **sections: Any
) -> tuple[int, str]:
    """Exit code and ``run.log`` of a run whose training ends with its error."""
    training.checkpoint = staticmethod(writing)  # type: ignore[assignment]
    log = {"wandb": "off", "console": "off"}
    made = run_config(**{"run_dir": str(folder), "log": log} | sections)
    code = module.run(Prepared(made, Inputs(ROWS), "cpu"))
    return code, (folder / "run.log").read_text()


NEVER = 60.0


@pytest.mark.parametrize(
    ("error", "bound_s", "grace_s", "seconds", "line"),
    [
        (BROKEN, 5, 1e-3, 0.05, ""),
        (BROKEN, 0.01, 5, NEVER, "not written within 0.01 s (checkpoint.timeout_s)"),
        (LOST, 600, 5, NEVER, f"not written within 0.01 s ({RECONNECT})"),
        (SIGNAL, 5, 0.01, NEVER, "not written within 0.01 s (shutdown.grace_s)"),
    ],
    ids=["not bounded by the grace", "as any other", "by what Ray leaves", "a signal's grace"],
)
def test_the_last_checkpoint_has_the_time_of_its_cause(
    tmp_path: Path,
    distilling: type[FakeTraining],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    bound_s: float,
    grace_s: float,
    seconds: float,
    line: str,
) -> None:
    monkeypatch.setattr(module, "left_s", lambda: 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    distilling.error, distilling.state_s = error, bound_s
    writing = Writing(seconds)
    _, log = ended(distilling, tmp_path / "run", writing, shutdown={"grace_s": grace_s})
    assert (writing.kept, line in log) == (not line, True)
    assert "no checkpoint at the end" not in log or line


@pytest.mark.parametrize(("seconds", "grace_s", "kept"), [(0.05, 5, True), (NEVER, 0.01, False)])
def test_a_signal_during_it_leaves_it_the_grace_and_the_run_has_failed(
    tmp_path: Path,
    distilling: type[FakeTraining],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    grace_s: float,
    kept: bool,
) -> None:
    """The handler of signals, which ends a process that takes too long, is a fake."""
    distilling.error, writing = BROKEN, Writing(seconds)

    def handler(work: asyncio.Task[Any], *_: Any) -> Any:
        writing.signalled.append(work)
        return SimpleNamespace(over=lambda: None, work_ended=lambda: work)

    monkeypatch.setattr(module, "SignalHandler", handler)
    code, log = ended(distilling, tmp_path / "run", writing, shutdown={"grace_s": grace_s})
    assert (code, writing.kept) == (1, kept)
    assert ("not written 0.01 s after the signal" in log) != kept


def test_a_run_whose_trainer_died_too_often_waits_for_no_checkpoint(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    distilling.error, writing = DIED, Writing()
    _, log = ended(distilling, tmp_path / "run", writing)
    assert not writing.begun
    assert "the trainer died" in log


def test_a_trainer_that_gives_no_sign_of_life_is_not_waited_for(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    class Silent(SavingTrainer):
        async def report(self) -> Any:
            await asyncio.Event().wait()

    distilling.error, distilling.trainer = BROKEN, Silent()
    _, log = ended(distilling, tmp_path / "run", Writing(), supervision={"timeout_s": 0.01})
    assert "trainer: a heartbeat answer took longer than 0.01 s" in log


@pytest.mark.parametrize("on_exit", [True, False])
def test_none_is_written_where_the_config_has_none_and_the_last_row_is_there(
    tmp_path: Path, distilling: type[FakeTraining], on_exit: bool
) -> None:
    distilling.error, writing = BROKEN, Writing()
    _, log = ended(distilling, tmp_path / "run", writing, checkpoint={"on_exit": on_exit})
    assert writing.kept == on_exit
    assert "the run has failed: guardrail: responses run away" in log
    assert '"step": 2' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_better_evaluation_of_a_step_without_a_checkpoint_has_a_line(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    async def trained(training: FakeTraining) -> None:
        written(training.job.store.folder, 2, 4)
        for step, value in ((2, 0.5), (3, 0.9), (4, 0.1)):
            training.job.store.evaluated.add(step, value)

    distilling.run = trained  # type: ignore[method-assign]
    data = {"train": "rows.jsonl", "eval": "rows.jsonl"}
    keep = {"keep_best": "eval/*/accuracy"}
    code, log = ended(distilling, tmp_path / "run", Writing(), checkpoint=keep, data=data)
    assert code == 0, log
    assert "step 3 has no checkpoint, though its eval/*/accuracy is 0.9" in log
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert '"checkpoint/best_step": 2.0' in summary
    assert '"checkpoint/best": 0.5' in summary
