"""The checkpointer reports why a checkpoint is missing, and the run goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_opd.checkpoint.checkpointer import Checkpointer, state_s
from async_opd.checkpoint.evaluated import EvaluatedSteps
from async_opd.checkpoint.store import Checkpoints
from async_opd.core.errors import CheckpointError, StageTimeout
from async_opd.core.reports import Captured
from tests.checkpoint.test_store import cut
from tests.world.clock import settle
from tests.world.config import run_config as config


class Writes:
    """A trainer whose files are written when the test sets it."""

    def __init__(self) -> None:
        self.begun, self.written = asyncio.Event(), asyncio.Event()

    async def capture(self) -> Captured:
        return Captured(4)

    async def checkpoint(self, folder: str, _: Any) -> dict[str, Any]:
        self.begun.set()
        await self.written.wait()
        return {}


def writing(tmp_path: Path, said: list[str], timeout_s: float) -> tuple[Checkpointer, Writes]:
    trainer: Any = Writes()
    store = Checkpoints(tmp_path, 2)
    more: dict[str, Any] = {"config": "{}", "timeout_s": timeout_s, "notify": said.append}
    return Checkpointer(store, trainer, **more), trainer


async def begun(checkpointer: Checkpointer) -> None:
    """A checkpoint begins, and is not waited for."""
    await checkpointer.take(lambda captured: cut(captured.step))


async def take(checkpointer: Checkpointer, step: int = 4) -> None:
    await checkpointer.take(lambda _: cut(step))
    await checkpointer.settled()


def blocked_commit(checkpointer: Checkpointer) -> tuple[threading.Event, threading.Event]:
    """Set when a commit has begun, and to be set for it to go on."""
    committing, go_on = threading.Event(), threading.Event()

    def sync() -> None:
        committing.set()
        go_on.wait(20)

    checkpointer.sync = sync
    return committing, go_on


async def test_a_checkpoint_that_takes_too_long_is_reported_with_its_bound(tmp_path: Path) -> None:
    said: list[str] = []
    checkpointer, _ = writing(tmp_path, said, 0.01)
    await take(checkpointer)
    assert said == [
        "no checkpoint of step 4, the run goes on: "
        "it took longer than 0.01 s, for which checkpoint.timeout_s and "
        "checkpoint.min_mib_per_s allow"
    ]


async def test_a_state_that_cannot_be_copied_now_is_a_checkpoint_that_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    checkpointer, trainer = writing(tmp_path, said, 20)

    async def refuse() -> Captured:
        raise CheckpointError("trainer", "the copy before is still being written")

    monkeypatch.setattr(trainer, "capture", refuse)
    await begun(checkpointer)
    assert said == ["a checkpoint is skipped: the copy before is still being written"]
    assert checkpointer.metrics["checkpoint/skipped"] == 1


async def test_any_failure_is_counted_and_the_next_checkpoint_is_taken(tmp_path: Path) -> None:
    said: list[str] = []
    checkpointer, trainer = writing(tmp_path, said, 20)
    trainer.written.set()
    syncs = iter([ValueError("write to closed file"), None])

    def sync() -> None:
        error = next(syncs)
        if error is not None:
            raise error

    checkpointer.sync = sync
    for step in (4, 8):
        await take(checkpointer, step)
    assert said[0].endswith("the run goes on: ValueError: write to closed file")
    assert (checkpointer.metrics["checkpoint/failures"], checkpointer.store.steps()) == (1, [8])


async def test_a_write_that_is_abandoned_never_becomes_a_checkpoint(tmp_path: Path) -> None:
    checkpointer, trainer = writing(tmp_path, [], 20)
    await begun(checkpointer)
    await trainer.begun.wait()
    await checkpointer.abandon(20)
    trainer.written.set()
    await asyncio.sleep(0)
    assert os.listdir(tmp_path) == []
    await take(checkpointer, 8)
    assert checkpointer.store.steps() == [8]


async def test_a_commit_after_its_timeout_is_reported_as_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, written = list[str](), list[tuple[int, Path]]()
    checkpointer, trainer = writing(tmp_path, said, 1)
    bound = asyncio.timeout(None)
    monkeypatch.setattr("async_opd.checkpoint.checkpointer.Bound", lambda _: bound)
    committing, go_on = blocked_commit(checkpointer)
    checkpointer.written = lambda step, folder: written.append((step, folder))
    trainer.written.set()
    taking = asyncio.create_task(take(checkpointer))
    assert await asyncio.to_thread(committing.wait, 20)
    bound.reschedule(0)
    await settle()
    go_on.set()
    await taking
    assert checkpointer.store.steps() == [4]
    assert said == ["checkpoint of step 4, though: it was late"]
    assert written == [(4, checkpointer.store.folder / "step_4")]
    assert checkpointer.metrics["checkpoint/step"] == 4
    assert checkpointer.metrics["checkpoint/write_s"] > 0
    assert checkpointer.metrics["checkpoint/failures"] == 0


@pytest.mark.parametrize("answers", [True, False])
async def test_what_is_abandoned_while_it_is_committed_is_a_checkpoint_first_or_an_error(
    tmp_path: Path, answers: bool
) -> None:
    checkpointer, trainer = writing(tmp_path, [], 20)
    committing, go_on = blocked_commit(checkpointer)
    trainer.written.set()
    await begun(checkpointer)
    await asyncio.to_thread(committing.wait, 20)
    if answers:
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await checkpointer.abandon(20)
        assert checkpointer.store.steps() == [4]
        return
    with pytest.raises(StageTimeout, match="after it was given up"):
        await checkpointer.abandon(0.01)
    go_on.set()


def checkpointer(tmp_path: Path, said: list[str], keep_best: str | None) -> Checkpointer:
    stages: Any = SimpleNamespace()
    more: dict[str, Any] = {"config": "{}", "timeout_s": 1, "keep_best": keep_best}
    return Checkpointer(Checkpoints(tmp_path, 2), stages, notify=said.append, **more)


@pytest.mark.parametrize(
    ("keep_best", "values"), [("eval/*/accuracy", {4: 0.75}), (None, {})], ids=str
)
async def test_an_evaluation_is_noted_for_the_metric_that_keeps_the_best(
    tmp_path: Path, keep_best: str | None, values: dict[int, float]
) -> None:
    said: list[str] = []
    keeping = checkpointer(tmp_path, said, keep_best)
    await keeping.evaluated(4, {"eval/a/accuracy": 0.5, "eval/b/accuracy": 1.0})
    assert keeping.store.evaluated.values() == values
    (tmp_path / "evaluated.json").write_text("damaged")
    await keeping.evaluated(8, {"eval/a/accuracy": 0.5})
    assert len(said) == (keep_best is not None)
    assert not said or "eval/*/accuracy of step 8 is not compared" in said[0]


async def test_the_checkpoint_that_is_evaluated_stays_until_its_value_is_known(
    tmp_path: Path,
) -> None:
    taking, trainer = writing(tmp_path, [], 20)
    trainer.written.set()
    taking.evaluating = lambda: 4
    for step in (4, 8, 12, 16):
        await take(taking, step)
    assert taking.store.steps() == [4, 12, 16]
    taking.evaluating = lambda: None
    await take(taking, 20)
    assert taking.store.steps() == [16, 20]


async def test_an_evaluation_that_is_cancelled_changes_no_value_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = checkpointer(tmp_path, [], "eval/a/accuracy")
    begun, go_on = threading.Event(), threading.Event()
    add = EvaluatedSteps.add

    def slow(steps: EvaluatedSteps, step: int, value: float) -> None:
        begun.set()
        assert go_on.wait(20)
        add(steps, step, value)

    monkeypatch.setattr(EvaluatedSteps, "add", slow)
    noting = asyncio.create_task(keeping.evaluated(4, {"eval/a/accuracy": 0.5}))
    await asyncio.to_thread(begun.wait, 20)
    noting.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    await asyncio.wait({noting})
    assert keeping.store.evaluated.values() == {4: 0.5}


@pytest.mark.parametrize(("rate", "bound_s"), [(1.0, 607.5), (0.5, 615.0)])
def test_the_time_of_12_bytes_each_is_added(rate: float, bound_s: float, tmp_path: Path) -> None:
    save_file({"w": np.zeros((1024, 640), np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    made = config(student={"model": str(tmp_path)}, checkpoint={"min_mib_per_s": rate})
    assert state_s(made) == bound_s
