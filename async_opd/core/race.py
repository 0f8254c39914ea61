"""One wait for the first of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


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
