"""The run lock: one process at a time works in a run directory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_opd.core.errors import ConfigError, Problem
from async_opd.files.safe_open import FOLDER_MODE

AGAIN_S = 0.1
"""Seconds until a lock is tried again: ``is_locked`` of another process holds it that short."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Holds the lock of the folder. ConfigError if another process holds it.

    The kernel releases the lock when the process ends, also by a signal. On a file system without
    locks every process holds it.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the lock; None on a file system without locks, or without rights."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return not _taken(handle)
    except OSError:
        return None
    finally:
        os.close(handle)  # also releases the lock


def _lock(handle: int, folder: Path) -> None:
    if not _taken(handle):
        message = f"another process runs in {folder}"
        remedy = "wait until it ends, or choose another --run-dir"
        raise ConfigError([Problem("command line", "run_dir", message, remedy)])


def _taken(handle: int) -> bool:
    """Takes the lock, unless another process holds it for longer than ``is_locked`` does."""
    for again in (True, False):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if again:
                time.sleep(AGAIN_S)
        else:
            return True
    return False
