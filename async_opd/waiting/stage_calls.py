"""Calls to a stage that end with it: none of them goes on beside the stage's successor."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from async_opd.core.errors import StageError

Result = TypeVar("Result")


class StageCalls:
    """The calls of other processes to ``stage``. Each runs in a separate task."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._calls: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of the work. StageError if the stage ends before, which cancels the work."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise StageError(
                self._stage, "a call was cancelled: the stage was stopped, or is replaced"
            )
        return task.result()

    async def stop(self, work: asyncio.Task[Any] | None) -> None:
        """Cancels all calls and the stage's own ``work``, and waits until they have ended."""
        tasks = {*self._calls} if work is None else {*self._calls, work}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
