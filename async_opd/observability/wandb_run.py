"""Which wandb run a run directory belongs to, and how far that has come: ``wandb_run.json``.

wandb takes no row back. So a run that goes on from a checkpoint goes on in the same wandb run,
after the last row that this was given; steps that come again are not given to it again.
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
    """``rows`` were given to the wandb run ``id``; ``step`` is the highest among them.

    ``evaluated`` is the highest among rows of evaluations, which come after their step's own.
    """

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    rows: Annotated[int, Field(ge=0, lt=2**48)] = 0
    step: Annotated[int, Field(ge=-1, lt=2**48)] = -1
    evaluated: Annotated[int, Field(ge=-1, lt=2**48)] = -1

    @classmethod
    def new(cls) -> Self:
        """One that wandb does not know yet."""
        return cls(secrets.token_hex(4))

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """That of a run directory; a new one if it has none, or none that can be read."""
        try:
            return TypeAdapter(cls).validate_json(read_bytes(run_dir / NAME))
        except (OSError, ValidationError):
            return cls.new()

    def after(self, step: int, *, evaluation: bool = False) -> Self:
        """With one row more."""
        if evaluation:
            return replace(self, rows=self.rows + 1, evaluated=max(self.evaluated, step))
        return replace(self, rows=self.rows + 1, step=max(self.step, step))

    def write(self, run_dir: Path) -> None:
        """OSError."""
        text = TypeAdapter(type(self)).dump_json(self).decode()
        write_atomically(run_dir / NAME, text + "\n", durable=False)
