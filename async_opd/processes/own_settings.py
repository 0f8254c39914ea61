"""Settings of a process of a run: its end with its parent, its heap, its niceness.

The parent-death signal ends a child process when its parent ends. Linux only.

A process may give large blocks of memory back to the system as soon as they are free. glibc keeps
what is freed for the next allocation. Its limit grows with each large block, up to blocks of
32 MiB, in the heap of each thread: after some messages of that size a process that only moves
samples holds up to 100 MiB that are free, now more and now less.

The next large block then costs its page faults: 0.4 ms a MiB on a virtual machine. So this is not
for a process that computes with its heap: a step of training on a CPU would take up to twice the
time.

A process that starts comes before those that serve, which it is to help. Processes of a local run
start with a niceness of ``STARTING`` and have ``SERVING`` from the end of their start on: at the
same cores a process that starts gets nine times the share of one that serves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
SAFE_PATH = "PYTHONSAFEPATH"
"""The environment variable that makes Python import nothing from the working directory."""


def set_parent_death_signal() -> None:
    """The kernel kills this process when the thread that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_parent_death_signal_in_child() -> None:
    """``set_parent_death_signal`` for children made by multiprocessing.

    It does nothing in other processes, whose starter is unknown.
    """
    if multiprocessing.parent_process() is not None:
        set_parent_death_signal()


LARGE = 4 << 20
"""Bytes of a block that is given back; the heap keeps at most twice as many free at its end."""
MOST = 32 << 20
"""Up to these bytes glibc's limit grows by itself."""
KEEPS = "ASYNC_OPD_KEEPS_HEAP"
CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""A user who sets one of these variables has chosen glibc's limits."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def give_back_large_blocks() -> None:
    """From now on. Nothing happens without glibc, or where one of the variables above is set."""
    _limit_blocks(LARGE)


def keep_large_blocks() -> None:
    """For a process that computes, and was forked from one that gives large blocks back.

    Its limits are those up to which glibc's grow.
    """
    _limit_blocks(MOST)


def _limit_blocks(size: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in (KEEPS, *CHOSEN)):
        return
    mallopt(_MMAP_THRESHOLD, size)
    mallopt(_TRIM_THRESHOLD, 2 * size)


STARTING, SERVING = 5, 15
"""15 is Ray's own default for its workers."""
OF_RAY, YIELDS = "RAY_worker_niceness", "ASYNC_OPD_YIELDS"


def starting_niceness() -> dict[str, str]:
    """The variables of a local cluster; none if the user has chosen a niceness."""
    return {} if OF_RAY in os.environ else {OF_RAY: str(STARTING), YIELDS: "1"}


def yield_to_starting() -> None:
    """Gives all threads of this process and its children the niceness of processes that serve.

    Nothing happens where the variables of ``starting_niceness`` are not set.
    """
    if not os.environ.get(YIELDS):
        return
    import psutil

    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            for thread in process.threads():
                with suppress(OSError):
                    now = os.getpriority(os.PRIO_PROCESS, thread.id)
                    os.setpriority(os.PRIO_PROCESS, thread.id, max(now, SERVING))
