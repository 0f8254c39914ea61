"""Runs a coroutine from ordinary code, also where an event loop runs already, as in a notebook.

no loop in this thread   the coroutine runs here
a loop in this thread    this thread waits ──► another thread, with a loop, runs the coroutine
                             └── SIGINT (a notebook's interrupt) cancels it
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
LOOK_S = 1.0
"""Seconds between two looks of a waiting thread for signals that another thread has received."""


def run_to_end(
    work: Coroutine[Any, Any, Result],
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Result:
    """Runs ``work`` in a new event loop; returns its result, or raises its error.

    Where the main thread has a running loop, the first SIGINT cancels the work, which may still
    return a result; later ones are ignored. KeyboardInterrupt is raised if it does not.
    """
    runner = asyncio.Runner(loop_factory=new_loop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with runner:
            return runner.run(work)
    return _in_a_thread(runner, work)


def _in_a_thread(runner: asyncio.Runner, work: Coroutine[Any, Any, Result]) -> Result:
    loop = runner.get_loop()
    task = loop.create_task(work)

    async def result() -> Result:
        return await task

    def run() -> Result:
        with runner:
            return runner.run(result())

    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if not interrupted:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)
        interrupted = True

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if is_main else None
    try:
        with ThreadPoolExecutor(1, "event loop") as thread:
            done = thread.submit(run)
            while not done.done():
                wait({done}, LOOK_S)
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if interrupted and isinstance(done.exception(), asyncio.CancelledError):
        raise KeyboardInterrupt
    return done.result()
