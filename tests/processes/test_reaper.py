"""A family of processes ends with the one that it began with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from async_opd.processes.reaper import MARKER, process_reaper
from tests.processes.test_signals import is_gone

ORPHAN = """
    # a grandchild in a separate session, whose parent has ended: an orphan
    start = "subprocess.Popen(['sleep', '60'], start_new_session=True)"
    orphan = f"import subprocess; print({start}.pid)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
"""
HIDDEN = """
    hidden = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    ours.track_descendants()
    print(hidden.pid)
"""
PROGRAM = """
import subprocess, sys, time
from async_opd.processes.reaper import process_reaper
with process_reaper() as ours:
    {start}
    sys.stdout.flush()
    time.sleep(60)
"""


@pytest.mark.parametrize("start", [ORPHAN, HIDDEN], ids=["an orphan", "noted without the mark"])
def test_processes_of_one_that_is_killed_end_with_it(start: str) -> None:
    program = PROGRAM.replace("{start}", start)
    first = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    started = int(first.stdout.readline())
    first.kill()
    first.wait(30)
    assert is_gone(started)


def test_processes_of_a_family_that_ended_well_go_on_and_those_to_be_killed_do_not() -> None:
    with process_reaper() as ours:
        ended = subprocess.Popen(["sleep", "60"])
        ours.kill_all()
        assert ended.wait(30) == -signal.SIGKILL
        child = subprocess.Popen(["sleep", "60"])
    assert child.poll() is None
    child.kill()
    child.wait(30)


def test_the_mark_is_there_only_within() -> None:
    with process_reaper():
        outer = os.environ[MARKER]
        with process_reaper():
            assert os.environ[MARKER] != outer
        assert os.environ[MARKER] == outer
    assert MARKER not in os.environ
