"""Bounds and pauses on a timer that can be replaced: tests decide when time has passed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from async_opd.core.errors import StageTimeout


class Cancellable(Protocol):
    """What a timer returns."""

    def cancel(self) -> None: ...


Timer = Callable[[float, Callable[[], None]], Cancellable]
"""Calls a function after so many seconds, unless it is cancelled before."""
Result = TypeVar("Result")


def loop_timer(delay: float, call: Any) -> asyncio.TimerHandle:
    """The event loop's own timer."""
    return asyncio.get_running_loop().call_later(delay, call)


class Deadline:
    """Waits that end after a time in seconds; ``math.inf`` is no bound.

    ``name`` is the stage, replica or actor that the errors name.
    """

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

    async def within(
        self,
        seconds: float,
        what: str,
        work: Awaitable[Result],
        remedy: str = "see supervision and teachers.*.health",
    ) -> Result:
        """The result of the work, which runs in the caller's task.

        After so many seconds the work is cancelled, and StageTimeout with ``what`` and ``remedy``
        is raised once the work has ended. A bound that an inner wait of the work reaches comes
        through as the error of that wait.
        """
        if seconds == math.inf:
            return await work
        try:
            async with asyncio.timeout(None) as bound:
                handle = self._timer(seconds, lambda: bound.reschedule(0))  # a time that is past
                try:
                    return await work
                finally:
                    handle.cancel()
        except TimeoutError as error:
            if not bound.expired():
                raise
            cause = f"{what} took longer than {seconds:g} s"
            raise StageTimeout(self._name, cause, remedy) from error
