"""The mirror: a thread that copies a run's checkpoints and results to ``checkpoint.mirror``.

    checkpoint, start, rewind ──► sync: the steps at the URL become those of the run directory
    the run's end             ──► sync, and the results besides; waited for, within a bound
    rollback                  ──► a note at the URL, beside an upload that lasts: copies of steps
                                  that the run has left are taken by no resume from then on

Training never waits for it. A failure is a warning, counted, and tried again with the next
checkpoint; a run that completed without a complete copy of its end has failed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from pydantic import TypeAdapter, ValidationError

from async_opd.accounting.lineage import ROLL_BACKS, parse_roll_backs
from async_opd.checkpoint.checkpointer import state_s
from async_opd.checkpoint.run_copies import (
    END,
    RESULTS,
    TEACHERS,
    Files,
    RunCopies,
    files_to_copy,
    name_of,
)
from async_opd.checkpoint.store import FOLDER, MANIFEST, Checkpoints
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError
from async_opd.core.reports import Level, WrittenFile
from async_opd.files.durable import checksum
from async_opd.files.foreign import ForeignPath
from async_opd.observability.sinks import Sink, Summary
from async_opd.processes.background import BackgroundWorker
from async_opd.processes.signals import signals_set

WAITING = 64
"""Requests for a sync that may wait; one sync does what all that wait ask for."""
POLL_S = 0.2
"""Seconds after which the wait at the end looks for a signal."""
TRIES = 3
"""Tries of the last sync."""
REMEDY = "look at the store, its quota and credentials; async_opd run --resume tries it again"
_Manifest = TypeAdapter(dict[str, WrittenFile])


class DamagedCheckpointError(OSError):
    """A checkpoint's files are not those that its manifest names."""


class Mirror(Sink):
    """A sink that gets the run's checkpoints, and copies them in a thread.

    ``bound_s`` is how long the end of the run waits for it, ``grace_s`` after a signal.
    ``teachers(step)`` are the folders with the refreshed teachers' weights at a step. ``notify``
    and ``summarize`` are called from the run's event loop only.
    """

    required = True  # what it raises, when it is closed, is the run's failure

    def __init__(
        self,
        store: Checkpoints,
        copies: RunCopies,
        bound_s: float,
        grace_s: float,
        teachers: Callable[[int], Collection[str]] = lambda step: (),
    ) -> None:
        self.notify: Callable[[str, Level], None] = lambda text, level: None
        self.summarize: Callable[[dict[str, float]], None] = lambda metrics: None
        self.metrics: dict[str, float] = {
            "mirror/step": 0.0,
            "mirror/failures": 0.0,
            "mirror/gib": 0.0,
            "mirror/upload_s": 0.0,
        }
        self._store, self._copies = store, copies
        self._run_dir = ForeignPath(store.folder.parent)
        self.longest_s, self._grace_s = bound_s, grace_s
        self._teachers = teachers
        self._me, self._claimed = token_hex(16), False
        self._noting = threading.Lock()
        self._noted: bytes | None = None  # the rollbacks that are noted at the URL
        self._ending, self._ended = False, False
        self._began: float | None = None  # when the sync began that is under way
        self._notes: deque[str] = deque(maxlen=WAITING)
        self._damaged: dict[int, object] = {}  # its manifest's checksum, by step
        self._failing = ""
        self._worker: BackgroundWorker[None] = BackgroundWorker("mirror", self._work, WAITING)

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path) -> Mirror | None:
        """That of a run; None if its config names no URL."""
        url = config.checkpoint.mirror
        if url is None:
            return None
        store = Checkpoints(run_dir / FOLDER, config.checkpoint.keep)
        refreshes = {*config.refreshes.values()}

        def teachers(step: int) -> Collection[str]:
            version = config.version_after(step)
            return {f"{TEACHERS}/version_{version - version % every}" for every in refreshes}

        grace_s = config.shutdown.grace_s
        return cls(store, RunCopies.at(url), state_s(config), grace_s, teachers)

    @property
    def name(self) -> str:
        """As in messages."""
        return "mirror"

    def count_in(self, metrics: dict[str, float]) -> None:
        """The mirror's metrics are counted in this mapping from now on; no key comes later."""
        metrics |= self.metrics
        self.metrics = metrics

    def start(self) -> None:
        """Removes at the URL what a run that goes on from an earlier step has left."""
        self._worker.put(None)

    def checkpoint(self, step: int, folder: Path) -> None:
        """Copies the checkpoint as soon as those before it are copied."""
        self._send_notes()
        began = self._began
        if began is not None and time.monotonic() - began > self.longest_s:
            self.metrics["mirror/failures"] += 1
            words = f"the mirror has not ended its upload within {self.longest_s:g} s"
            self.notify(f"{words} (checkpoint.timeout_s, checkpoint.min_mib_per_s)", "warning")
        self._worker.put(None)

    def roll_back(self, within_s: float) -> str | None:
        """Notes the run's rollbacks at the URL; a warning if that fails or takes longer. Blocks."""
        # a second thread: an upload under way may hold the first one
        worker: BackgroundWorker[None] = BackgroundWorker("rollback", lambda _: self._note(), 1)
        worker.put(None)
        cause = f"no answer within {within_s:g} s"
        try:
            if worker.close(within_s):
                return None
        except Exception as error:  # of stores: the run goes on
            cause = str(error) or type(error).__name__
        self.metrics["mirror/failures"] += 1
        words = f"{self._copies.place} does not have the rollback yet: {cause}"
        return f"mirror: {words}\n→ until it has, resume the run only in {self._run_dir}"

    def rewind(self) -> None:
        """Removes the copies of steps that the run has left."""
        self._worker.put(None)

    def log(self, step: int, metrics: object) -> None:
        """Logs the copy thread's queued messages."""
        self._send_notes()

    def close(self, summary: Summary) -> str | None:
        """Copies the results, and waits for all copies.

        StageError if a completed run has no complete copy of its end; of another one, a message.
        """
        bound_s = self._grace_s if summary.status == "interrupted" else self.longest_s
        self.notify(f"mirroring the end of the run to {self._copies.place}", "info")
        self._ending = True
        arrived, deadline = threading.Event(), time.monotonic() + bound_s
        with signals_set(arrived):
            self._worker.put(None)
            while not (done := self._worker.close(POLL_S)):
                if arrived.is_set() or time.monotonic() > deadline:
                    break
        self._send_notes()
        self.summarize(dict(self.metrics))
        if self._ended:
            self.notify(f"the end of the run is at {self._copies.place / END}", "info")
            return None
        cause = "a signal ended the wait" if arrived.is_set() else f"not uploaded in {bound_s:g} s"
        cause = self._failing if done else cause
        cause = f"{self._copies.place} lacks the end of the run: {cause}"
        if summary.status == "completed":
            raise StageError(self.name, cause, REMEDY)
        return f"{cause}; {self._run_dir} has it"

    def _send_notes(self) -> None:
        while self._notes:
            self.notify(self._notes.popleft(), "warning")

    def _work(self, items: list[None]) -> None:
        """One sync for all requests; the last one is tried again. Never raises."""
        for left in reversed(range(TRIES if self._ending else 1)):
            self._began = time.monotonic()
            try:
                self._sync(self._ending)
            except Exception as error:  # of files, of stores: the run goes on
                self.metrics["mirror/failures"] += 1
                self._failing = str(error) or type(error).__name__
                when = f"; tries left: {left}" if self._ending else ", until the next checkpoint"
                text = f"{self._copies.place} is not up to date{when}: {self._failing}"
                self._notes.append(f"mirror: {text}\n→ {REMEDY}")
            else:
                return
            finally:
                self._began = None

    def _sync(self, ending: bool) -> None:
        """Makes the copies at the URL those of the checkpoints in the run directory."""
        self._note()
        if not ending:
            self._copies.remove(END)
        for step in reversed(self._store.steps()):
            self._upload_unless_damaged(step)
        # Copies go once the newest step is there. A run directory without any (its disk may be
        # gone) removes none; one that has gone back removes those of the way that it has left.
        now = self._store.steps()
        if now and self._copies.complete(name_of(now[-1])) is not None:
            self.metrics["mirror/step"] = float(now[-1])
            for step in self._copies.steps():
                if step not in now:
                    self._copies.refuse_other(self._me)
                    self._copies.remove(name_of(step))
        if ending:
            self._copies.refuse_other(self._me)
            self._copies.upload(END, files_to_copy(self._run_dir, *RESULTS), lambda sent: None)
            self._ended = True

    def _note(self) -> None:
        """Claims the URL, and notes the run's rollbacks there unless they are."""
        with self._noting:
            if not self._claimed:
                self._copies.claim(self._me)
                self._claimed = True
            self._copies.refuse_other(self._me)
            content = b"[]"
            with suppress(FileNotFoundError):
                content = (self._run_dir / ROLL_BACKS).read()
            if content != self._noted:
                number = len(parse_roll_backs(content))
                if number:
                    self._copies.remove(END)  # of the run before
                self._copies.note(content, number)
                self._noted = content

    def _upload_unless_damaged(self, step: int) -> None:
        """Uploads a checkpoint; a damaged one that is not the newest is left out, with a warning.

        A resume takes the newest one that is whole. The next sync may find a damaged one renewed.
        """
        manifest = self._run_dir / f"{FOLDER}/{name_of(step)}/{MANIFEST}"
        seen = checksum(manifest) if manifest.is_file() else None
        if seen is not None and self._damaged.get(step) == seen:
            return
        try:
            self._upload(step)
        except DamagedCheckpointError as error:
            if step == max(self._store.steps(), default=step):
                raise
            self._damaged[step] = seen
            self.metrics["mirror/failures"] += 1
            self._notes.append(f"mirror: {self._copies.place} gets no copy of step {step}: {error}")

    def _upload(self, step: int) -> None:
        """Uploads a checkpoint that is not there yet, with the run's other files."""
        began, within = time.monotonic(), f"{FOLDER}/{name_of(step)}"
        manifest = self._run_dir / within / MANIFEST
        try:
            before = manifest.read()
            there = self._copies.complete(name_of(step))
            if there and there.files.get(f"{within}/{MANIFEST}") == checksum(manifest):
                return
            files = files_to_copy(self._run_dir, *self._teachers(step))
            of_step = [manifest, *(manifest.parent / name for name in _manifest(before))]
            files |= {one.within: one for one in of_step}

            def check(sent: Files) -> None:
                self._copies.refuse_other(self._me)  # an upload may take hours
                # A run that has gone back has other files: they do not belong to this checkpoint.
                if manifest.read() != before:
                    raise FileNotFoundError(str(manifest))
                for name, file in _manifest(before).items():
                    if sent[f"{within}/{name}"] != file:
                        raise DamagedCheckpointError(
                            f"{within}/{name} is not as its {MANIFEST} says"
                        )

            self._copies.refuse_other(self._me)
            sent = self._copies.upload(name_of(step), files, check)
        except FileNotFoundError:
            if step in self._store.steps():
                raise
            return  # the checkpoint was removed meanwhile
        self.metrics["mirror/gib"] = sum(file.bytes for file in sent.values()) / (1 << 30)
        self.metrics["mirror/upload_s"] = time.monotonic() - began


def _manifest(content: bytes) -> Files:
    try:
        return _Manifest.validate_json(content)
    except ValidationError as error:
        raise DamagedCheckpointError(
            f"a {MANIFEST} has {error.error_count()} invalid values"
        ) from error
