"""The process reaper: a shell process that kills all processes of a run when its driver ends.

    driver ──pipe──► sh: waits for the driver's end ──► kill -9 of the run's processes

A process of the run has the run's marker variable in its environment, which it inherits from its
parent: Ray's head, actors, engines, and their children. Processes that change their title may lose
their environment, as Ray's agents do: these are tracked by process id. The reaper needs Linux and
GNU grep; without them Ray's processes notice within a minute or two that the driver has ended.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil

MARKER = "ASYNC_OPD_RUN"
"""The marker variable. Each run has a different value."""
END_S = 10.0
"""Seconds that ``kill_all`` waits for the reaper, whose rounds take about one second."""
SCRIPT = """
noted=
while read -r pid start; do
  noted="$noted $pid:$start"
done
for one in $noted; do
  begun=$(sed 's/.*) //' "/proc/${one%:*}/stat" | cut -d ' ' -f 20)
  [ "$begun" = "${one#*:}" ] && kill -9 "${one%:*}"
done
none=
for round in 1 2 3 4 5 6 7 8 9; do
  files=$(grep -lzxsF "$0" /proc/[0-9]*/environ)
  [ "$files$none" = none ] && break
  none=none
  for file in $files; do
    none=
    pid=${file#/proc/}
    kill -9 "${pid%/environ}"
  done
  sleep 0.1
done
[ -z "$1" ] || rm -rf -- "$1"
"""
"""First the tracked processes, whose start times show whether the id is another process's by now.
Then the marked ones, until two rounds in succession find none: a killed process may just have
started another one, and a process has no environment in the middle of an exec. Last, the directory
in which they all worked is removed."""


@dataclass(frozen=True)
class ProcessReaper:
    """The processes of a run and the shell that kills them."""

    shell: subprocess.Popen[bytes]

    def track_descendants(self) -> None:
        """Tracks all descendants of this process, with or without the marker variable."""
        assert self.shell.stdin is not None
        for pid in (process.pid for process in psutil.Process().children(recursive=True)):
            if pid != self.shell.pid:
                with suppress(OSError, IndexError):  # the process, or the shell, has ended
                    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
                    self.shell.stdin.write(f"{pid} {start}\n".encode())
                    self.shell.stdin.flush()

    def kill_all(self) -> None:
        """kill -9 of all processes of the run; returns within ``END_S`` seconds."""
        assert self.shell.stdin is not None
        self.shell.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.shell.wait(END_S)


@contextmanager
def process_reaper(folder: Path | None = None) -> Iterator[ProcessReaper]:
    """Processes started within the context are killed when this process ends in it.

    Then ``folder``, which only they use, is removed too. Leaving the context kills none of them.
    """
    value = uuid4().hex
    shell = subprocess.Popen(
        ["sh", "-c", SCRIPT, f"{MARKER}={value}", str(folder or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run
    )
    before = os.environ.get(MARKER)
    os.environ[MARKER] = value
    try:
        yield ProcessReaper(shell)
    finally:
        os.environ.pop(MARKER)
        if before is not None:
            os.environ[MARKER] = before
        shell.kill()
        shell.communicate()
