"""Processes that end with the one that started them, however that ends. Linux only."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys

PR_SET_PDEATHSIG = 1
SAFE_PATH = "PYTHONSAFEPATH"
"""Of the environment: Python leaves the working directory out of where it imports from."""


def set_parent_death_signal() -> None:
    """The kernel kills this process when the thread that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_parent_death_signal_in_child() -> None:
    """``set_parent_death_signal`` for children made by multiprocessing.

    Nothing happens outside of them: who started other processes is not known.
    """
    if multiprocessing.parent_process() is not None:
        set_parent_death_signal()
