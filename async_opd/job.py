"""A run that may begin: its input is checked, and the files of its directory are open."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from async_opd.accounting.journal import LEDGER, Journal
from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.store import Checkpoint, Checkpoints
from async_opd.checks.preflight import Inputs
from async_opd.config.run_config import RunConfig
from async_opd.files.durable import flush
from async_opd.files.lines import whole_lines
from async_opd.observability.run_log import DEAD_LETTERS, METRICS, RunLog
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
