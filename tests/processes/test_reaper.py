"""A family of processes ends with the one that it began with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from async_opd.processes.reaper import MARKER, process_reaper
from tests.processes.test_signals import is_gone

PROGRAM = """
import subprocess, sys, time
from async_opd.processes.reaper import process_reaper

with process_reaper():
    # a grandchild in a separate session, whose parent has ended: an orphan
    start = "subprocess.Popen(['sleep', '60'], start_new_session=True)"
    orphan = f"import subprocess; print({start}.pid)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    sys.stdout.flush()
    time.sleep(60)
"""


def test_orphans_of_a_process_that_is_killed_end_with_it() -> None:
    first = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    orphan = int(first.stdout.readline())
    first.kill()
    first.wait(30)
    assert is_gone(orphan)


HIDDEN = """
import subprocess, sys, time
from async_opd.processes.reaper import process_reaper

with process_reaper() as ours:
    hidden = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    ours.track_descendants()
    print(hidden.pid, flush=True)
    time.sleep(60)
"""


def test_a_noted_process_ends_without_the_mark_too() -> None:
    first = subprocess.Popen([sys.executable, "-c", HIDDEN], stdout=subprocess.PIPE, text=True)
    hidden = int(first.stdout.readline())
    first.kill()
    first.wait(30)
    assert is_gone(hidden)


def test_nothing_happens_to_processes_of_a_family_that_ended_well() -> None:
    with process_reaper():
        child = subprocess.Popen(["sleep", "60"])
    assert child.poll() is None
    child.kill()
    child.wait(30)


def test_a_family_can_be_ended_before_its_first_process_is() -> None:
    with process_reaper() as ours:
        child = subprocess.Popen(["sleep", "60"])
        ours.kill_all()
        assert child.wait(30) == -signal.SIGKILL


def test_the_mark_is_there_only_within() -> None:
    with process_reaper():
        outer = os.environ[MARKER]
        with process_reaper():
            assert os.environ[MARKER] != outer
        assert os.environ[MARKER] == outer
    assert MARKER not in os.environ
