"""Bounds and pauses on a timer that can be replaced: tests decide when time has passed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from async_opd.core.errors import StageTimeout


class Cancellable(Protocol):
    """The result of a timer."""

    def cancel(self) -> None: ...


Timer = Callable[[float, Callable[[], None]], Cancellable]
"""Calls a function after so many seconds, unless it is cancelled before."""
Result = TypeVar("Result")


def loop_timer(delay: float, call: Any) -> asyncio.TimerHandle:
    """The event loop's own timer."""
    return asyncio.get_running_loop().call_later(delay, call)


LATE_S = 0.01
"""Seconds by which a timer is later than it should be when the event loop was blocked."""


class Bound:
    """``async with`` it around work that TimeoutError ends after so many seconds.

    It is ``asyncio.timeout`` but for an event loop that was blocked: the time by which its timer
    was late is given to the work once more, at most ``seconds`` in all. An answer that has arrived
    meanwhile is in time so, however many turns of the loop it takes to the work. ``inf`` is not a
    bound. ``timer`` replaces the loop's own; it is never late.
    """

    def __init__(self, seconds: float, timer: Timer | None = None) -> None:
        self._left = self._seconds = seconds
        self._timer = timer
        self._timeout = asyncio.timeout(None)
        self._due = 0.0
        self._handle: Cancellable | None = None

    async def __aenter__(self) -> asyncio.Timeout:
        await self._timeout.__aenter__()
        if self._timer is not None and self._seconds < math.inf:
            self._handle = self._timer(self._seconds, self._end)
        elif self._seconds < math.inf:
            self._begin(self._seconds)
        return self._timeout

    async def __aexit__(self, *error: Any) -> None:
        if self._handle is not None:
            self._handle.cancel()
        await self._timeout.__aexit__(*error)

    def _begin(self, seconds: float) -> None:
        self._due = asyncio.get_running_loop().time() + seconds
        self._handle = loop_timer(seconds, self._ring)

    def _ring(self) -> None:
        # uvloop calls timers before it reads what has arrived, and asyncio cancels a task whose
        # result is there but a turn away: neither may decide which task has answered in time
        late = asyncio.get_running_loop().time() - self._due
        if late > LATE_S and self._left > 0:
            again = min(late, self._left)
            self._left -= again
            self._begin(again)
        else:
            self._end()

    def _end(self) -> None:
        self._timeout.reschedule(0)  # a time that is past


class Deadline:
    """Waits that end after a time in seconds; ``math.inf`` is not a bound.

    ``name`` is the stage, replica or actor that the errors name.
    """

    def __init__(self, name: str, timer: Timer | None = None) -> None:
        self._name = name
        self._timer = timer

    async def pause(self, seconds: float) -> None:
        """Returns after so many seconds."""
        if seconds > 0:
            over = asyncio.Event()
            handle = (self._timer or loop_timer)(seconds, over.set)
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
            async with Bound(seconds, self._timer) as bound:
                return await work
        except TimeoutError as error:
            if not bound.expired():
                raise
            cause = f"{what} took longer than {seconds:g} s"
            raise StageTimeout(self._name, cause, remedy) from error
