"""The checkpointer reports why a checkpoint is missing, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_opd.checkpoint.checkpointer import Checkpointer
from async_opd.checkpoint.store import Checkpoints
from async_opd.core.stages import Captured
from tests.checkpoint.test_store import cut


async def test_a_checkpoint_that_takes_too_long_is_reported_with_its_bound(tmp_path: Path) -> None:
    async def capture() -> Captured:
        return Captured(4, ())

    async def checkpoint(*_: Any) -> None:
        await asyncio.Event().wait()

    said: list[str] = []
    checkpointer = Checkpointer(
        Checkpoints(tmp_path, 2),
        SimpleNamespace(capture=capture, checkpoint=checkpoint),  # type: ignore[arg-type]
        config="{}",
        timeout_s=0.01,
        notify=said.append,
    )
    await checkpointer.take(lambda captured: cut(captured.step))
    await checkpointer.settled()
    assert said == [
        "no checkpoint of step 4, the run goes on: "
        "it took longer than 0.01 s, for which checkpoint.timeout_s and "
        "checkpoint.min_mib_per_s allow"
    ]


def checkpointer(tmp_path: Path, said: list[str], keep_best: str | None) -> Checkpointer:
    stages: Any = SimpleNamespace()
    more: dict[str, Any] = {"config": "{}", "timeout_s": 1, "keep_best": keep_best}
    return Checkpointer(Checkpoints(tmp_path, 2), stages, notify=said.append, **more)


async def test_an_evaluation_is_noted_for_the_metric_that_keeps_the_best(tmp_path: Path) -> None:
    keeping = checkpointer(tmp_path, [], "eval/*/accuracy")
    await keeping.evaluated(4, {"eval/a/accuracy": 0.5, "eval/b/accuracy": 1.0})
    assert keeping.store.evaluated.values() == {4: 0.75}


async def test_without_that_metric_no_evaluation_is_noted(tmp_path: Path) -> None:
    keeping = checkpointer(tmp_path, [], None)
    await keeping.evaluated(4, {"eval/a/accuracy": 0.5})
    assert keeping.store.evaluated.values() == {}


async def test_an_evaluation_that_cannot_be_noted_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    keeping = checkpointer(tmp_path, said, "eval/a/accuracy")
    (tmp_path / "evaluated.json").write_text("damaged")
    await keeping.evaluated(4, {"eval/a/accuracy": 0.5})
    assert len(said) == 1
    assert "eval/a/accuracy of step 4 is not compared" in said[0]
