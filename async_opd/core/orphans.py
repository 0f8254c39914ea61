"""Engine processes that end with the actor that started them, however it ends. Linux only."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it has ended.

    Nothing happens outside of a child made by multiprocessing: who started others is not known.
    """
    if sys.platform == "linux" and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
