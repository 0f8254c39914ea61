"""A child of multiprocessing does not outlive a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.processes.test_signals import is_gone

PROGRAM = """
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
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30)
    assert is_gone(child)
