"""A process gives large blocks of memory back to the system as soon as they are free.

glibc keeps what is freed for the next allocation. Its limit grows with each large block, up to
blocks of 32 MiB, in the heap of each thread: after some messages of that size a process that only
moves samples holds up to 100 MiB that are free, now more and now less.

The next large block then costs its page faults: 0.4 ms a MiB on a virtual machine. So this is not
for a process that computes with its heap: a step of training on a CPU would take up to twice the
time.
"""

from __future__ import annotations

import ctypes
import os

LARGE = 4 << 20
"""Bytes of a block that is given back; the heap keeps at most twice as many free at its end."""
KEEPS = "ASYNC_OPD_KEEPS_HEAP"
CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""A user who sets one of these variables has chosen glibc's limits."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def give_back_large_blocks() -> None:
    """From now on. Nothing happens without glibc, or where one of the variables above is set."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in (KEEPS, *CHOSEN)):
        return
    mallopt(_MMAP_THRESHOLD, LARGE)
    mallopt(_TRIM_THRESHOLD, 2 * LARGE)
