"""All processes that a run starts end when it does, however it ends: one of ours sees to it.

    driver ──pipe──► sh: waits for its end ──► kill -9 of the family

The family is who carries its mark in the environment, which a process inherits from the one that
started it: Ray's head, actors, engines, and what these start; and who was noted, because a process
that changes its title may lose its environment, as Ray's agents do. It takes Linux and GNU grep;
without them Ray's processes notice by themselves that the driver is gone, within a minute or two.
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

NAME = "ASYNC_OPD_FAMILY"
END_S = 10.0
"""The watcher's rounds take about one second."""
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
"""A number may be another process's by then, its start says so. The second part until nobody was
found twice: who is killed may just have started another, and in the middle of an exec a process
has no environment. Last, the directory that they all worked in."""


@dataclass(frozen=True)
class ProcessReaper:
    """A family and its watcher."""

    watcher: subprocess.Popen[bytes]

    def track_descendants(self) -> None:
        """Everybody below this process now belongs to it, with or without its mark."""
        assert self.watcher.stdin is not None
        for pid in (process.pid for process in psutil.Process().children(recursive=True)):
            if pid != self.watcher.pid:
                with suppress(OSError, IndexError):  # it, or the watcher, ended meanwhile
                    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
                    self.watcher.stdin.write(f"{pid} {start}\n".encode())
                    self.watcher.stdin.flush()

    def kill_all(self) -> None:
        """kill -9 of everybody, now; returns within seconds."""
        assert self.watcher.stdin is not None
        self.watcher.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.watcher.wait(END_S)


@contextmanager
def process_reaper(folder: Path | None = None) -> Iterator[ProcessReaper]:
    """What is started within ends with this process, if it does not end before.

    Then the ``folder``, theirs alone, goes too; not if this process leaves the context.
    """
    value = uuid4().hex
    watcher = subprocess.Popen(
        ["sh", "-c", SCRIPT, f"{NAME}={value}", str(folder or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run
    )
    before = os.environ.get(NAME)
    os.environ[NAME] = value
    try:
        yield ProcessReaper(watcher)
    finally:
        os.environ.pop(NAME)
        if before is not None:
            os.environ[NAME] = before
        watcher.kill()
        watcher.communicate()
