"""Bounded waits: for one work, for the first of several or for all, for the calls of a stage.

Bounds and pauses are on a timer that can be replaced: tests decide when time has passed.
``StageCalls`` end with their stage: none of them goes on beside the stage's successor.
A ``Gate`` is passed by work, and closing it waits until no work is inside. ``offload`` does long
work on large arrays in a thread, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from async_opd.core.errors import StageError, StageTimeout, first_cause


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


P = ParamSpec("P")


async def race(*works: Awaitable[Result]) -> Result:
    """The result, or the error, of the work that is done first.

    Of works that are done at once it is the one that was given first. The others are cancelled and
    have ended when this returns, also when the caller is cancelled; their errors are dropped. A
    work that takes its time to end after it is cancelled delays the result as long.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        # gather retrieves the errors, and waits for all of them even when it is cancelled itself
        await asyncio.gather(*tasks, return_exceptions=True)
    return first.result()


async def endless(
    name: str, work: Awaitable[None], during: str = "while the run was going on"
) -> NoReturn:
    """Awaits a stage's own loop; StageError with the stage's name if the loop ends."""
    await work
    raise StageError(name, f"its loop ended {during}")


async def in_thread(work: Callable[P, Result], *args: P.args, **named: P.kwargs) -> Result:
    """The work's result. After a cancellation it returns when the thread is done, too."""
    # A thread cannot be cancelled: its caller must not go on while it still writes.
    return await to_its_end(asyncio.to_thread(work, *args, **named))


async def to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. A cancellation takes effect when the work has ended."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def gather_or_cancel(*works: Coroutine[Any, Any, Result]) -> list[Result]:
    """The results of all works, in order. The first error cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        raise first_cause(errors) from errors
    return [task.result() for task in tasks]


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


class Gate:
    """Open at first. Enter with ``async with``; while it is closed, entering waits."""

    def __init__(self) -> None:
        self._inside = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._abandoned = 0

    async def __aenter__(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()

    async def __aexit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    @property
    def closed(self) -> bool:
        """Whether work that comes now waits."""
        return not self._open.is_set()

    async def empty(self) -> None:
        """Returns when no work is inside."""
        await self._empty.wait()

    async def close(self) -> bool:
        """Lets no work enter any more; returns when none is inside.

        False if ``open`` or ``abandon_close`` was called meanwhile: the gate may be open, or
        another call may be closing it.
        """
        abandoned = self._abandoned
        self._open.clear()
        await self._empty.wait()
        return self._abandoned == abandoned

    def abandon_close(self) -> None:
        """Makes every ``close`` under way return False; the gate stays closed until ``open``."""
        self._abandoned += 1

    def open(self) -> None:
        """Lets work enter, first of all the work that waits."""
        self.abandon_close()
        self._open.set()


LARGE = 1 << 20
"""Bytes that are read or copied in about a millisecond: as long as a thread takes to begin."""


async def offload(
    nbytes: int, work: Callable[P, Result], *args: P.args, **named: P.kwargs
) -> Result:
    """The result of work on so many bytes: in a thread if they are many, else at once."""
    if nbytes < LARGE:
        return work(*args, **named)
    return await asyncio.to_thread(work, *args, **named)
