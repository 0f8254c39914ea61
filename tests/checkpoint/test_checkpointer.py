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
        "it took longer than checkpoint.timeout_s = 0.01 s"
    ]
