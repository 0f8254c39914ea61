"""An engine's own process on a CPU, forked from its actor's process, which has imported vLLM.

    actor: imports vLLM ──fork──► engine's process: has vLLM

In an actor of Ray, vLLM would start an interpreter that imports all of it a second time. Of the
actor's threads, the child has only the one that forks, and no other thread may hold a lock that the
child needs. The child uses nothing of Ray: it ends without the interpreter's own end, collects none
of the actor's objects, and closes its copies of the actor's sockets, by which Ray notices the
actor's death. On a GPU, CUDA cannot be used after a fork.
"""

from __future__ import annotations

import ctypes
import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

from async_opd.processes.own_settings import keep_large_blocks, set_parent_death_signal

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
