"""One thread for all work on a GPU that has to stay in order; another to make its input ahead.

    event loop ──run(work)──► queue ──one call after the other──► thread ──result──► event loop

torch's current CUDA stream belongs to a thread, and streams are not ordered among each other: steps
that ran on threads of a pool could run on different streams.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

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


def ahead(thread: Executor, make: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """The result of ``make`` for each item, in order: the next is made while the caller uses one.

    An error of ``make`` is raised in the place of its result. When the iterator ends, or is closed,
    nothing is being made.
    """
    coming: deque[Future[R]] = deque()
    try:
        for item in items:
            coming.append(thread.submit(make, item))
            if len(coming) == 2:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        wait(coming)


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
