"""``live.json``: which process a run has, and what its pools wait for, for ``async_opd watch``.

The run replaces the file every 2 s, as a sign of life. It removes the file when it ends, so that a
file that no process renews is that of a run that was killed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from async_opd.files.foreign import Place, foreign
from async_opd.files.lines import Count, Seconds
from async_opd.files.safe_open import write_atomically
from async_opd.observability.sinks import Sink, Summary

LIVE_FILE = "live.json"
BEAT_S = 2.0
CLOSE_S = 5.0
"""Seconds that the end of the run waits for the disk."""
WAIT_CHARACTERS = 200
"""The longest text on what a pool waits for."""


@dataclass(frozen=True)
class LiveRun:
    """The content of the file. ``born`` is when the kernel started the process, in its ticks.

    ``started`` and ``time`` are seconds since the epoch: of the run's begin, and of this sign of
    life. ``earlier_s`` are the seconds of the parts before, of a resumed run.
    """

    pid: Count
    host: str
    born: Annotated[int, Field(ge=-1, lt=1 << 63)]
    started: Seconds
    time: Seconds
    waits: Mapping[str, str] = field(default_factory=dict)
    earlier_s: Seconds = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds of all parts of the run."""
        return self.earlier_s + self.time - self.started

    @property
    def is_here(self) -> bool:
        """Whether the process runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    @property
    def has_process(self) -> bool:
        """Whether this machine has the process; another one may have its id by now."""
        return self.born == started_at(self.pid)


class LiveFile(Sink):
    """Writes ``live.json`` of a run directory, in a separate thread."""

    name = "live view"

    def __init__(
        self, run_dir: Path, clock: Callable[[], float] = time.time, earlier_s: float = 0.0
    ) -> None:
        self._path = run_dir / LIVE_FILE
        self._clock = clock
        self._earlier_s = earlier_s
        self._waits: Mapping[str, str] = {}
        self._ended = threading.Event()
        self._failure: OSError | None = None

    def start(self) -> None:
        """Writes the file. OSError."""
        pid, now = os.getpid(), self._clock()
        here = (pid, socket.gethostname(), started_at(pid))
        self._run = LiveRun(*here, now, now, earlier_s=self._earlier_s)
        self.beat()
        self._thread = threading.Thread(target=self._beats, name="live-file", daemon=True)
        self._thread.start()

    def waits(self, waits: Mapping[str, str]) -> None:
        """Keeps what pools wait for, until the next write. Raises an error of a write once."""
        self._waits = {pool: wait[:WAIT_CHARACTERS] for pool, wait in waits.items()}
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def beat(self) -> None:
        """Replaces the file. OSError."""
        content = asdict(self._run) | {"time": self._clock(), "waits": dict(self._waits)}
        write_atomically(self._path, json.dumps(content) + "\n", durable=False)

    def close(self, summary: Summary) -> str | None:
        """Removes the file, unless the disk does not answer."""
        self._ended.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            return f"{LIVE_FILE} remains: its disk did not answer for {CLOSE_S:g} s"
        self._path.unlink(missing_ok=True)
        return None

    def _beats(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self.beat()
            except OSError as error:  # of a disk that may answer again
                self._failure = error


def read_live(folder: Place) -> LiveRun | None:
    """The live file of a run directory; None without one, or if it is damaged."""
    try:
        return TypeAdapter(LiveRun).validate_json((foreign(folder) / LIVE_FILE).read())
    except (OSError, ValidationError):
        return None


def started_at(pid: int) -> int:
    """When the kernel started the process, in its ticks since the boot; -1 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return -1
