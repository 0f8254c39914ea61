"""An engine's own process on a CPU, forked from its actor's process, which has imported vLLM.

    actor: imports vLLM ──fork──► engine's process: has vLLM

vLLM starts an interpreter in an actor of Ray, which imports all of it a second time: 8 to 10 s of
processor time for each engine. Of the actor's threads, the child has only the one that forks, and
no other thread may hold a lock that the child needs. The child uses nothing of Ray: it ends without
the interpreter's own end, frees none of the actor's objects, and closes its copies of the actor's
sockets, by which Ray notices the actor's death. Of a GPU, CUDA could not be used after a fork.
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

from async_opd.processes.own_settings import set_parent_death_signal

PR_SET_NAME = 15


class _EngineProcess(ForkProcess):
    """Ends with the process that forked it. ``ps -o comm`` shows its name, as vLLM gives it."""

    def run(self) -> None:
        set_parent_death_signal()
        ctypes.CDLL(None).prctl(PR_SET_NAME, self.name.encode())  # Ray has moved the title
        gc.freeze()  # a handle of Ray that is collected asks a thread which the child has not
        _close_sockets()
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


def _close_sockets() -> None:
    """All but the standard streams."""
    for fd in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        try:
            if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
        except OSError:  # the folder's own descriptor
            continue
