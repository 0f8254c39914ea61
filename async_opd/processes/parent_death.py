"""The parent-death signal: a child process ends when its parent ends. Linux only."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys

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
