"""``roll_backs.json``: the guardrail's rollbacks of a run, which no checkpoint undoes.

Each one lowers the learning rate for the rest of the run; the checkpoints that the run goes back to
are older than it, so that they cannot hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from async_opd.core.errors import CheckpointError
from async_opd.files.safe_open import read_bytes, write_atomically

ROLL_BACKS = "roll_backs.json"


@dataclass(frozen=True)
class RollBack:
    """The run went back because of what the guardrail found at ``step``."""

    step: int
    reason: str


_RollBacks = TypeAdapter(list[RollBack])


def read_roll_backs(run_dir: Path) -> list[RollBack]:
    """All rollbacks of the run, in order. CheckpointError for a file that was changed."""
    path = run_dir / ROLL_BACKS
    try:
        return _RollBacks.validate_json(read_bytes(path))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        invalid = isinstance(error, ValidationError)  # whose text quotes the file
        raise CheckpointError(
            "guardrail",
            f"{path} cannot be read: {'it has invalid values' if invalid else error}",
            "restore it, or remove it: the learning rate is then that of a run without rollbacks",
        ) from error


def add_roll_back(run_dir: Path, one: RollBack) -> int:
    """Appends a rollback to the file. Returns the number of all."""
    found = [*read_roll_backs(run_dir), one]
    content = _RollBacks.dump_json(found, indent=1)
    write_atomically(run_dir / ROLL_BACKS, content.decode())
    return len(found)
