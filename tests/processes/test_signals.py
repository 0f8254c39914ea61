"""Signals, in separate processes: asked once, a run ends by itself; else it is ended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from async_opd.processes.signals import SignalHandler

PROGRAM = """
import asyncio, os, subprocess, sys
from async_opd.processes.signals import SignalHandler

shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
below = int(shell.stdout.readline())

async def work(stubborn):
    print(shell.pid, below, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled", flush=True)
        while stubborn:
            await asyncio.sleep(60)

def on_forced_exit(why):
    print(why, flush=True)
    return 131

async def main(stubborn, grace_s):
    task = asyncio.create_task(work(stubborn))
    interruption = SignalHandler(task, grace_s, on_forced_exit, lambda line: None)
    try:
        await task
    except asyncio.CancelledError:
        interruption.over()
        shell.kill()
        os.kill(below, 9)
        return 7

sys.exit(asyncio.run(main(sys.argv[1] == "stubborn", float(sys.argv[2]))))
"""


class Program:
    def __init__(self, manner: str, grace_s: float) -> None:
        command = [sys.executable, "-c", PROGRAM, manner, str(grace_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.children = [int(pid) for pid in self.line().split()]

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def asked(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        return self.line()

    def code(self) -> int:
        return self.process.wait(30)


def is_gone(pid: int) -> bool:
    """Dead, or a zombie that nobody has waited for."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_work_end_by_itself(number: signal.Signals) -> None:
    program = Program("obedient", 30)
    assert program.asked(number) == "cancelled"
    assert program.code() == 7


def test_a_second_sigint_ends_it_at_once_with_its_children_and_its_exit_code() -> None:
    program = Program("stubborn", 60)
    assert program.asked(signal.SIGINT) == "cancelled"
    assert program.asked(signal.SIGINT) == "a second SIGINT ended the run at once"
    assert program.code() == 131
    assert all(map(is_gone, program.children))


@pytest.mark.slow
def test_after_its_grace_it_is_ended_with_its_children() -> None:
    program = Program("stubborn", 2)
    assert program.asked(signal.SIGTERM) == "cancelled"
    assert program.line() == "the run did not end 2 s after a signal (shutdown.grace_s)"
    assert program.code() == 131
    assert all(map(is_gone, program.children))


def test_the_first_signal_says_at_once_that_the_run_ends_and_how_to_end_it_sooner() -> None:
    said: list[str] = []

    async def interrupted() -> None:
        work = asyncio.create_task(asyncio.Event().wait())
        handler = SignalHandler(work, 60, lambda why: 1, said.append)
        for _ in range(2):
            handler.signal(signal.SIGTERM)
        with suppress(asyncio.CancelledError):
            await handler.work_ended()
        handler.over()

    asyncio.run(interrupted())
    (line,) = said
    assert "another SIGINT (Ctrl-C) ends it at once" in line
