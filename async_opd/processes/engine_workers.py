"""Calls into the processes of a vLLM engine.

No worker raises, and no call outlives the engine:

    on_workers ──collective_rpc("attempt")──► each worker: the method
         └──► results, or WorkersFailed ◄────── its result, or its fault as text

vLLM's executor of several workers takes their answers in turn and stops at the first error. The
answers of the other workers stay in their queues, and each later call would get the answers of the
call before it (``tests/contracts/test_worker_answers.py``). vLLM itself calls ``sleep`` and
``wake_up``: see ``refuse_broken_sleep``.

Pending calls fail when the engine's process ends:

    work ─────────┬──► its result
    process ends ─┴──► ProcessDied

vLLM's client fails the requests of an engine that is gone, but not the calls that were under way: a
broadcast into a killed engine would hold its weight sync until ``sync.timeout_s``.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn, Protocol, TypeVar

from async_opd.core.errors import ProcessDied, WorkersFailed
from async_opd.processes.last_lines import last_error_line
from async_opd.waiting.deadline import race


class FaultReturningWorker:
    """A base of the workers of all our engines."""

    def attempt(self, method: str, *args: Any) -> tuple[Any, str]:
        """The result of a method of the worker, and its error's text; "" if there is none."""
        try:
            return getattr(self, method)(*args), ""
        except Exception as error:
            traceback.print_exc()
            return None, f"{type(error).__name__}: {error}"

    def refuse_broken_sleep(self) -> None:
        """Makes ``sleep`` and ``wake_up`` keep their errors; raises the first one, if there is one.

        It raises ever after: a worker that is half asleep computes no more.
        """
        if "wake_up" not in vars(self):
            self._broken_sleep: Exception | None = None
            for name in ("sleep", "wake_up"):
                setattr(self, name, self._keeping_errors(getattr(self, name)))
        if self._broken_sleep is not None:
            raise self._broken_sleep

    def _keeping_errors(self, work: Callable[..., None]) -> Callable[..., None]:
        def kept(*args: Any, **options: Any) -> None:
            try:
                work(*args, **options)
            except Exception as error:
                self._broken_sleep = self._broken_sleep or error

        return kept


class Workers(Protocol):
    """An engine, as vLLM's AsyncLLM is one."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> Any: ...


async def on_workers(engine: Workers, name: str, method: str, *args: Any) -> list[Any]:
    """Calls a method in every worker of the engine ``name``; returns the results, in their order.

    Waits for all workers. WorkersFailed if the method raises in some of them.
    """
    answers = await engine.collective_rpc("attempt", args=(method, *args))
    faults = tuple(fault for _, fault in answers)
    if any(faults):
        raise WorkersFailed(name, method, faults)
    return [result for result, _ in answers]


Result = TypeVar("Result")


class ExitWatch:
    """Watches processes by their ``sentinels``, which become readable when a process ends.

    ``sentinels`` are multiprocessing's.
    """

    def __init__(self, name: str, sentinels: Iterable[int]) -> None:
        self._name = name
        # copies: the engine's client closes its own, whose numbers may then be other files
        self._sentinels = [os.dup(sentinel) for sentinel in sentinels]
        self._ended = asyncio.Event()
        self._watched = False
        self._last_error = ""

    async def within(self, work: Awaitable[Result]) -> Result:
        """The work's result. ProcessDied as soon as one of the processes has ended."""
        self._watch()
        return await race(work, self._death())

    async def _death(self) -> NoReturn:
        await self._ended.wait()
        last = f"; {self._last_error}" if self._last_error else ""
        raise ProcessDied(self._name, f"its engine's process has ended{last}", "see its log")

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            for sentinel in self._sentinels:
                asyncio.get_running_loop().add_reader(sentinel, self._end)

    def _end(self) -> None:
        """Called once; the other sentinels are watched no more."""
        self._last_error = last_error_line()
        self._ended.set()
        for sentinel in self._sentinels:
            asyncio.get_running_loop().remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels = []
