"""A run that may begin: its input is checked, and the files of its directory are open."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from async_opd.accounting.journal import LEDGER, Journal
from async_opd.checkpoint.earlier_run import refuse_begun
from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.resume import (
    IDENTITY,
    cut_files,
    identity,
    refuse_changes,
    refuse_impossible,
)
from async_opd.checkpoint.store import Checkpoint, Checkpoints
from async_opd.checks.preflight import Inputs
from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.files.durable import flush
from async_opd.files.lines import whole_lines
from async_opd.files.origin import add_origin
from async_opd.files.run_format import write_run_format
from async_opd.files.safe_open import write_atomically
from async_opd.observability.live.console import open_console
from async_opd.observability.live.live_file import LiveFile
from async_opd.observability.run_log import DEAD_LETTERS, METRICS, SUMMARY, RunLog, seconds_so_far
from async_opd.observability.sinks import Sink
from async_opd.prepare import Prepared
from async_opd.waiting.waits import Waits


@dataclass(frozen=True)
class Job:
    """A run that may begin: config, rows, directory, first checkpoint (if any), log and journal."""

    ready: Prepared
    run_dir: Path
    start: Checkpoint | None
    log: RunLog
    journal: Journal
    mirror: Mirror | None = None

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.ready.config

    @property
    def inputs(self) -> Inputs:
        """The rows of its data."""
        return self.ready.inputs

    def message(self, text: str) -> None:
        """See RunLog.message."""
        self.log.message(text)

    @cached_property
    def waits(self) -> Waits:
        """Names what the driver waits for, in the log."""
        return Waits(self.message)

    @cached_property
    def store(self) -> Checkpoints:
        """The run's checkpoints."""
        return Checkpoints.of(self.config, self.run_dir, self.inputs.eval)

    def sync(self) -> None:
        """Flushes to the disk what a checkpoint of now belongs to. Blocks. OSError."""
        self.journal.sync()
        for name in (METRICS, DEAD_LETTERS):
            with suppress(FileNotFoundError):  # there is none before the first line
                flush(self.run_dir / name)

    def sizes(self) -> dict[str, int]:
        """Bytes of the complete lines of each file that only grows."""
        letters = whole_lines(self.run_dir / DEAD_LETTERS)
        return {LEDGER: self.journal.size, DEAD_LETTERS: letters}


@contextmanager
def opened(
    ready: Prepared,
    run_dir: Path,
    resume: bool,
    viewers: Sequence[Sink],
    notes: Sequence[str],
) -> Iterator[Job]:
    """The job in a directory whose run lock is held. ``notes`` become messages.

    Files of a run that is resumed are cut to its checkpoint. ConfigError if the directory holds an
    earlier run, or with ``resume`` a checkpoint of another config.
    """
    messages = [*ready.inputs.notes, *notes]
    config, inputs = ready.config, ready.inputs
    start = _start(config, inputs, run_dir, resume, messages.append)
    earlier_s = seconds_so_far(run_dir) if resume else 0.0
    write_run_format(run_dir)
    (run_dir / SUMMARY).unlink(missing_ok=True)  # it says how the previous process ended
    describe(run_dir, config, inputs)
    redacted = Redactor(config.model_dump(mode="json", by_alias=True))
    add_origin(run_dir, sys.argv[1:], redacted, ready.device)
    cut = start.cut if start else None
    before = cut_files(run_dir, cut) if resume else None
    size = cut.files.get(LEDGER, 0) if cut else 0
    mirror = Mirror.of(config, run_dir)
    sinks = [*_viewers(config, run_dir, earlier_s), *viewers]
    sinks += [] if mirror is None else [mirror]
    with (
        RunLog(config, run_dir, before=before, viewers=sinks, earlier_s=earlier_s) as log,
        Journal(run_dir / LEDGER, size) as journal,
    ):
        if mirror is not None:
            mirror.notify, mirror.summarize = log.message, log.summarize
        for note in messages:
            log.message(note)
        yield Job(ready, run_dir, start, log, journal, mirror)


def describe(run_dir: Path, config: RunConfig, inputs: Inputs) -> None:
    """Writes the config of a run, and the identity with which a resumed one is compared."""
    write_atomically(run_dir / "config.yaml", dump_config(config))
    write_atomically(run_dir / IDENTITY, identity(config, inputs.checked))


def _start(
    config: RunConfig, inputs: Inputs, run_dir: Path, resume: bool, notify: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint at which the run begins, None for the start.

    ConfigError if the run directory holds an earlier run, or a checkpoint of another config.
    """
    store = Checkpoints.of(config, run_dir, inputs.eval)
    if not resume:
        refuse_begun(run_dir)
        return None
    start = store.newest(notify)
    if start is None:
        notify(f"{run_dir} has no checkpoint: the run starts from the beginning")
        return None
    refuse_changes(start.config, identity(config, inputs.checked))
    refuse_impossible(start.cut, config)
    notify(f"going on after step {start.cut.step}, weight version {start.cut.version}")
    return start


def _viewers(config: RunConfig, run_dir: Path, earlier_s: float) -> list[Sink]:
    """The sinks for viewers: ``async_opd watch``, and the console of the config."""
    console = open_console(config, time.time, None, earlier_s)
    live = LiveFile(run_dir, earlier_s=earlier_s)
    return [live, *([] if console is None else [console])]
