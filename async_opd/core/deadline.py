"""Bounds and pauses on a timer that can be replaced: tests decide when time has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from async_opd.core.errors import StageTimeout


class Cancellable(Protocol):
    """What a timer returns."""

    def cancel(self) -> None: ...


Timer = Callable[[float, Callable[[], None]], Cancellable]
"""Calls something after so many seconds, unless cancelled before."""
Result = TypeVar("Result")


def loop_timer(delay: float, call: Any) -> asyncio.TimerHandle:
    """The event loop's own timer."""
    return asyncio.get_running_loop().call_later(delay, call)


class Deadline:
    """Waits that end by themselves. ``name`` is what the errors call the one who waits."""

    def __init__(self, name: str, timer: Timer | None = None) -> None:
        self._name = name
        self._timer = timer or loop_timer

    async def pause(self, seconds: float) -> None:
        """Returns after so many seconds."""
        if seconds > 0:
            over = asyncio.Event()
            handle = self._timer(seconds, over.set)
            try:
                await over.wait()
            finally:
                handle.cancel()

    async def within(self, seconds: float, what: str, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of the work. StageTimeout, and the work cancelled, after so many seconds."""
        task = asyncio.create_task(work, name=f"{self._name}: {what}")
        late = asyncio.Event()

        def ring() -> None:
            late.set()
            task.cancel()

        handle = self._timer(seconds, ring)
        try:
            await asyncio.wait({task})
        finally:
            handle.cancel()
            task.cancel()
        if late.is_set() and task.cancelled():
            raise StageTimeout(
                self._name,
                f"{what} took longer than {seconds:g} s",
                "see supervision and teachers.*.health",
            )
        return task.result()
