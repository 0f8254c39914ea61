"""The processes of a vLLM engine: how they begin on a CPU, and calls into them.

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

On a CPU the engine's own process is forked from its actor's, which has imported vLLM:

    actor: imports vLLM ──fork──► engine's process: has vLLM

In an actor of Ray, vLLM would start an interpreter that imports all of it a second time. Of the
actor's threads, the child has only the one that forks, and no other thread may hold a lock that the
child needs. The child uses nothing of Ray: it ends without the interpreter's own end, collects none
of the actor's objects, and closes its copies of the actor's sockets, by which Ray notices the
actor's death. On a GPU, CUDA cannot be used after a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import stat
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from async_opd.core.errors import ProcessDied, WorkersFailed
from async_opd.processes.output import last_error_line
from async_opd.processes.own_settings import keep_large_blocks, set_parent_death_signal
from async_opd.waiting.deadline import race

PR_SET_NAME = 15


class _EngineProcess(ForkProcess):
    """Ends with the process that forked it. ``ps -o comm`` shows its name, as vLLM gives it."""

    _parent_pid: int  # of multiprocessing

    def start(self) -> None:
        """Forks; the child never returns from here.

        A handle of Ray that the child's collector found would need a thread that only the actor
        has: the actor's objects are out of reach of the child's collector.
        """
        gc.disable()
        try:
            super().start()
        finally:
            gc.enable()

    def run(self) -> None:
        set_parent_death_signal()
        if os.getppid() != self._parent_pid:  # the actor ended before the signal was set
            os._exit(1)
        ctypes.CDLL(None).prctl(PR_SET_NAME, self.name.encode())  # Ray has moved the title
        keep_large_blocks()
        gc.freeze()
        gc.unfreeze = lambda: None  # which vLLM calls at an engine's end
        gc.enable()
        _replace_sockets()
        super().run()


class _Forking(ForkContext):
    Process = _EngineProcess


@contextmanager
def forked_engine(launcher: Any, on_cpu: bool) -> Iterator[None]:
    """vLLM's ``launcher``, ``vllm.v1.engine.utils``, forks the processes that it starts within.

    It does so in an actor, and for an engine ``on_cpu``.
    """
    before = launcher.get_mp_context
    if on_cpu and "ASYNC_OPD_ACTOR" in os.environ:
        launcher.get_mp_context = _Forking
    try:
        yield
    finally:
        launcher.get_mp_context = before


def _replace_sockets() -> None:
    """Closes the actor's sockets, except the standard streams, and puts /dev/null in their places.

    An object of the actor that ends in the child closes its number again, which must be of no file
    that the engine has opened since.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        try:
            if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.dup2(nothing, fd, inheritable=False)
        except OSError:  # the folder's own descriptor
            continue
    os.close(nothing)


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
