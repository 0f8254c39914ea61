"""The checkpoint of a run that ends before its time, how long it may take; and the best one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd import run as run_module
from async_opd.cluster.watching.watch import RECONNECT
from async_opd.core.errors import HeadLost, ProcessDied, StageError
from async_opd.core.reports import StageReport
from async_opd.run import _checkpoint_after_failure, _checkpoint_at_end, _save_best
from async_opd.waiting.waits import Waits
from tests.checkpoint.test_store import config, written

DATA = {"train": "rows.jsonl", "eval": "rows.jsonl"}
BROKEN = StageError("guardrail", "responses run away")


class Ending:
    """A pipeline whose checkpoint is written when it is told; it is its own log and trainer."""

    def __init__(self, grace_s: float = 5, timeout_s: float = 5, life_s: float = 5) -> None:
        self.config = config(
            shutdown={"grace_s": grace_s},
            supervision={"timeout_s": life_s},
        )
        self.state_s = timeout_s
        self.stages = self.trainer = self
        self.waits = Waits(print)
        self.begun, self.written = asyncio.Event(), asyncio.Event()
        self.kept = self.dead = self.logged = False
        self.told: list[str] = []

    async def report(self) -> StageReport:
        if self.dead:
            await asyncio.Event().wait()
        return StageReport()

    def log_rows(self) -> None:
        self.logged = True

    async def checkpoint(self) -> None:
        self.begun.set()
        await self.written.wait()
        self.kept = True

    def message(self, text: str, level: str = "info") -> None:
        self.told.append(text)


def after(made: Any, error: Exception = BROKEN) -> asyncio.Task[None]:
    return asyncio.create_task(_checkpoint_after_failure(error, made, made))


async def test_the_checkpoint_after_an_error_is_not_bounded_by_the_grace() -> None:
    made = Ending(grace_s=1e-3)
    keeping = after(made)
    await made.begun.wait()
    asyncio.get_running_loop().call_later(0.05, made.written.set)
    await keeping
    assert made.kept


async def test_the_checkpoint_after_an_error_is_bounded_as_any_other() -> None:
    made = Ending(timeout_s=0.01)
    await after(made)
    assert "not written within 0.01 s (checkpoint.timeout_s)" in made.told[-1]


async def test_the_checkpoint_after_the_loss_of_the_head_has_the_time_that_ray_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "left_s", lambda: 0.01)
    made = Ending(timeout_s=600)
    await after(made, HeadLost("cluster", "Ray's head has not answered for 20 s"))
    assert f"not written within 0.01 s ({RECONNECT})" in made.told[-1]


async def test_a_signal_during_it_lets_it_finish_within_the_grace() -> None:
    made = Ending()
    keeping = after(made)
    await made.begun.wait()
    keeping.cancel()
    asyncio.get_running_loop().call_soon(made.written.set)
    await keeping
    assert made.kept


async def test_a_signal_during_it_leaves_it_no_more_than_the_grace() -> None:
    made = Ending(grace_s=0.01)
    keeping = after(made)
    await made.begun.wait()
    keeping.cancel()
    await asyncio.wait_for(keeping, 2)
    assert "not written 0.01 s after the signal" in made.told[-1]
    assert not made.kept


async def test_a_run_whose_trainer_died_too_often_waits_for_no_checkpoint() -> None:
    made = Ending()
    await after(made, ProcessDied("trainer", "its process died"))
    assert not made.begun.is_set()
    assert "the trainer died" in made.told[-1]


async def test_a_trainer_that_gives_no_sign_of_life_is_not_waited_for() -> None:
    made = Ending(life_s=0.01)
    made.dead = True
    await after(made)
    assert "trainer: a heartbeat answer took longer than 0.01 s" in made.told[-1]


async def test_the_checkpoint_after_a_signal_is_bounded_by_the_grace() -> None:
    made: Any = Ending(grace_s=0.01)
    await _checkpoint_at_end(made, made, 0.01, "shutdown.grace_s")
    assert "not written within 0.01 s (shutdown.grace_s)" in made.told[-1]


async def test_the_error_is_told_before_its_checkpoint_is_written() -> None:
    made = Ending()
    made.written.set()
    await after(made)
    assert made.told == ["the run has failed: guardrail: responses run away"]


@pytest.mark.parametrize("on_exit", [True, False])
async def test_none_is_written_where_none_is_wanted(on_exit: bool) -> None:
    made = Ending()
    checkpoint = made.config.checkpoint.model_copy(update={"on_exit": on_exit})
    made.config = made.config.model_copy(update={"checkpoint": checkpoint})
    made.written.set()
    await after(made)
    assert (made.kept, made.logged) == (on_exit, True)


async def test_a_better_evaluation_of_a_step_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    told, summary = list[str](), dict[str, float]()
    best = {"keep_best": "eval/*/accuracy"}
    log = SimpleNamespace(summarize=summary.update)
    job: Any = SimpleNamespace(
        config=config(checkpoint=best, data=DATA),
        store=written(tmp_path, 2, 4),
        run_dir=tmp_path,
        log=log,
        waits=Waits(print),
    )
    job.message = told.append
    for step, value in ((2, 0.5), (3, 0.9), (4, 0.1)):
        job.store.evaluated.add(step, value)
    stages: Any = Saving()
    await _save_best(stages, job, 60)
    assert told[0] == "step 3 has no checkpoint, though its eval/*/accuracy is 0.9"
    assert summary == {"checkpoint/best_step": 2.0, "checkpoint/best": 0.5}


class Saving:
    """The stages of a run, whose trainer restores and saves nothing."""

    def __init__(self) -> None:
        self.trainer: Any = self

    async def restore(self, directory: str) -> None: ...

    async def save(self, directory: str) -> None: ...
