"""The wandb run of a run directory and the rows that it has: ``wandb_run.json``.

wandb cannot delete a row. So a resumed run continues the same wandb run after its last row, and
steps that come once more are not logged to it again.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from async_opd.files.safe_open import read_bytes, write_atomically

NAME = "wandb_run.json"


@dataclass(frozen=True)
class WandbRun:
    """The wandb run ``id`` has ``rows`` rows; ``step`` is the highest step among them.

    ``evaluated`` is the highest step among rows of evaluations, which come after their step's own.
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
    def of(cls, run_dir: Path) -> Self:
        """The wandb run of a run directory; a new one if its file is missing or invalid."""
        try:
            return TypeAdapter(cls).validate_json(read_bytes(run_dir / NAME))
        except (OSError, ValidationError):
            return cls.new()

    def after(self, step: int, *, evaluation: bool = False) -> Self:
        """A copy with one row more."""
        if evaluation:
            return replace(self, rows=self.rows + 1, evaluated=max(self.evaluated, step))
        return replace(self, rows=self.rows + 1, step=max(self.step, step))

    def write(self, run_dir: Path) -> None:
        """Writes ``wandb_run.json``. OSError if that fails."""
        text = TypeAdapter(type(self)).dump_json(self).decode()
        write_atomically(run_dir / NAME, text + "\n", durable=False)
