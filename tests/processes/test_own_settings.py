"""The end of a process with its parent, the memory that it gives back, and its niceness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from async_opd.processes.own_settings import (
    CHOSEN,
    KEEPS,
    LARGE,
    OF_RAY,
    SERVING,
    YIELDS,
    starting_niceness,
)
from tests.processes.test_signals import is_gone

SHOWN_BYTES = """
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


def kept(chosen: dict[str, str], program: str = SHOWN_BYTES) -> int:
    """Bytes of a message of 3 * LARGE that a process still has once it is free."""
    ours = {key: value for key, value in os.environ.items() if key not in (KEEPS, *CHOSEN)}
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, env=ours | chosen, capture_output=True, check=True, text=True)
    return int(shown.stdout)


def test_a_large_block_that_is_free_goes_back_to_the_system() -> None:
    assert kept({}) < LARGE


def test_an_engine_that_is_forked_from_an_actor_keeps_it() -> None:
    ours = "from async_opd.processes.own_settings import keep_large_blocks\nkeep_large_blocks()\n"
    assert kept({}, SHOWN_BYTES.replace("before =", f"{ours}before =")) > 2 * LARGE


@pytest.mark.parametrize("chosen", [{KEEPS: "1"}, {CHOSEN[0]: str(32 << 20)}])
def test_a_process_that_computes_or_has_limits_of_the_user_keeps_it(chosen: dict[str, str]) -> None:
    assert kept(chosen) > 2 * LARGE


SHOWN_NICENESS = """
import os, subprocess, sys, threading
from async_opd.processes.own_settings import yield_to_starting
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
os.environ.update({environment})
yield_to_starting()
ids = [os.getpid(), thread.native_id, child.pid]
print([os.getpriority(os.PRIO_PROCESS, one) for one in ids], os.nice(0))
child.communicate(b"x")
over.set()
"""


def niceness(environment: dict[str, str]) -> list[int]:
    code = SHOWN_NICENESS.replace("{environment}", repr(environment))
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    *found, _ = shown.stdout.replace("[", "").replace("]", "").replace(",", "").split()
    return [int(one) for one in found]


def test_a_process_that_serves_its_threads_and_children_give_way() -> None:
    assert {max(one, SERVING) for one in niceness({YIELDS: "1"})} == {SERVING}


def test_a_niceness_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OF_RAY, "0")
    assert starting_niceness() == {}
    assert len(set(niceness({YIELDS: ""}))) == 1


PARENT = """
import multiprocessing, time
from async_opd.processes.own_settings import set_parent_death_signal_in_child

def child():
    set_parent_death_signal_in_child()
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30)
    assert is_gone(child)
