"""A run directory's run in a logger, and the steps that it has there: ``<logger>_run.json``.

Loggers cannot delete a row. So a resumed run continues the same run after its last row, and steps
that come once more are not logged to it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from async_opd.config.sections.log import LOGGERS
from async_opd.files.foreign import foreign
from async_opd.files.safe_open import write_atomically


def file_of(logger: str) -> str:
    """The name of the file in the run directory."""
    return f"{logger}_run.json"


LOGGED_RUNS = {file_of(logger): logger for logger in ("wandb", *LOGGERS)}
"""The loggers by the name of their file."""


def is_evaluation(metrics: Mapping[str, float]) -> bool:
    """Whether a row is an evaluation's, which comes after its step's own."""
    return any(key.startswith("eval") for key in metrics)


@dataclass(frozen=True)
class LoggedRun:
    """The run ``id`` has ``rows`` rows; ``step`` is the highest step among them.

    ``evaluated`` is the highest step among rows of evaluations.
    """

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    rows: Annotated[int, Field(ge=0, lt=2**48)] = 0
    step: Annotated[int, Field(ge=-1, lt=2**48)] = -1
    evaluated: Annotated[int, Field(ge=-1, lt=2**48)] = -1

    @classmethod
    def new(cls) -> Self:
        """A run with a new id."""
        return cls(secrets.token_hex(4))

    @classmethod
    def of(cls, run_dir: Path, logger: str) -> Self:
        """The logger's run of a run directory; a new one if its file is missing or invalid."""
        return cls.noted(run_dir, logger) or cls.new()

    @classmethod
    def noted(cls, run_dir: Path, logger: str) -> Self | None:
        """The logger's run of a run directory; None if its file is missing or invalid."""
        try:
            return TypeAdapter(cls).validate_json((foreign(run_dir) / file_of(logger)).read())
        except (OSError, ValidationError):
            return None

    def has(self, step: int, *, evaluation: bool) -> bool:
        """Whether it has the row of the step, or of a later one."""
        return step <= (self.evaluated if evaluation else self.step)

    def after(self, step: int, *, evaluation: bool = False) -> Self:
        """A copy with one row more."""
        if evaluation:
            return replace(self, rows=self.rows + 1, evaluated=max(self.evaluated, step))
        return replace(self, rows=self.rows + 1, step=max(self.step, step))

    def write(self, run_dir: Path, logger: str) -> None:
        """Writes the file. OSError if that fails."""
        text = TypeAdapter(type(self)).dump_json(self).decode()
        write_atomically(run_dir / file_of(logger), text + "\n", durable=False)


def take_logged_runs(source: Path, run_dir: Path) -> None:
    """Notes in a run directory the loggers' runs of a copy of it. OSError if that fails.

    A run that the directory has already is only continued: no copy puts another in its place.
    """
    for logger in LOGGED_RUNS.values():
        there, here = LoggedRun.noted(source, logger), LoggedRun.noted(run_dir, logger)
        if there is not None and (here is None or here.id == there.id):
            there.write(run_dir, logger)
