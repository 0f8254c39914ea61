"""The memory of a large message goes back to the system once it is free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from async_opd.processes.own_settings import CHOSEN, KEEPS, LARGE

SHOWN = """
import psutil
from async_opd.processes.own_settings import LARGE, give_back_large_blocks
def resident():
    return psutil.Process().memory_info().rss
block = b"1" * (4 * LARGE)
del block  # glibc keeps blocks of this size from now on
give_back_large_blocks()
before = resident()
message = b"1" * (3 * LARGE)
later = b"1" * (64 << 10)  # in use behind the message, if that is in the heap
del message
print(resident() - before)
"""


def kept(chosen: dict[str, str], program: str = SHOWN) -> int:
    """Bytes of a message of 3 * LARGE that a process still has once it is free."""
    ours = {key: value for key, value in os.environ.items() if key not in (KEEPS, *CHOSEN)}
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, env=ours | chosen, capture_output=True, check=True, text=True)
    return int(shown.stdout)


def test_a_large_block_that_is_free_goes_back_to_the_system() -> None:
    assert kept({}) < LARGE


def test_an_engine_that_is_forked_from_an_actor_keeps_it() -> None:
    ours = "from async_opd.processes.own_settings import keep_large_blocks\nkeep_large_blocks()\n"
    assert kept({}, SHOWN.replace("before =", f"{ours}before =")) > 2 * LARGE


@pytest.mark.parametrize("chosen", [{KEEPS: "1"}, {CHOSEN[0]: str(32 << 20)}])
def test_a_process_that_computes_or_has_limits_of_the_user_keeps_it(chosen: dict[str, str]) -> None:
    assert kept(chosen) > 2 * LARGE
