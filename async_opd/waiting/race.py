"""Waits for several works: for the first of them, or for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from async_opd.core.errors import StageError, first_cause

Result = TypeVar("Result")
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


async def endless(name: str, work: Awaitable[None]) -> None:
    """Awaits a stage's own loop; StageError with the stage's name if the loop ends."""
    await work
    raise StageError(name, "its loop ended while the run was going on")


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
