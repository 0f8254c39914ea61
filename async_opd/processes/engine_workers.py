"""Calls of methods in all workers of a vLLM engine: none of them raises inside of its worker.

    on_workers ──collective_rpc("attempt")──► each worker: the method
         └──► results, or WorkersFailed ◄────── its result, or its fault as text

vLLM's executor of several workers takes their answers in turn and stops at the first error. The
answers of the other workers stay in their queues, and each later call would get the answers of the
call before it (``tests/contracts/test_worker_answers.py``). vLLM itself calls ``sleep`` and
``wake_up``: see ``refuse_broken_sleep``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Protocol

from async_opd.core.errors import WorkersFailed


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
