"""One thread for all work on a GPU that has to stay in order.

    event loop ──run(work)──► queue ──one call after the other──► thread ──result──► event loop

torch's current CUDA stream belongs to a thread, and streams are not ordered among each other: steps
that ran on threads of a pool could run on different streams.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Calls = SimpleQueue[Callable[[], None] | None]


class WorkThread:
    """Runs calls in the order they come, all on the same thread.

    The thread ends with this object. It is a daemon: the end of the process waits for no work.
    """

    def __init__(self, name: str) -> None:
        self._calls: Calls = SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def run(self, work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> asyncio.Future[T]:
        """The result of the work. A call that is cancelled before it has begun never begins."""
        done: Future[T] = Future()
        call = partial(contextvars.copy_context().run, work, *args, **named)
        self._calls.put(partial(_complete, done, call))
        return asyncio.wrap_future(done)


def _work(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the arguments, perhaps on a GPU


def _complete(done: Future[T], call: Callable[[], T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)
