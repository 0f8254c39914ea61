"""Processes that serve give way to one that starts, with all of their threads and children."""

from __future__ import annotations

import subprocess
import sys

import pytest

from async_opd.processes.own_settings import OF_RAY, SERVING, YIELDS, starting_niceness

SHOWN = """
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
    code = SHOWN.replace("{environment}", repr(environment))
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    *found, _ = shown.stdout.replace("[", "").replace("]", "").replace(",", "").split()
    return [int(one) for one in found]


def test_a_process_that_serves_its_threads_and_children_give_way() -> None:
    assert {max(one, SERVING) for one in niceness({YIELDS: "1"})} == {SERVING}


def test_a_niceness_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OF_RAY, "0")
    assert starting_niceness() == {}
    assert len(set(niceness({YIELDS: ""}))) == 1
