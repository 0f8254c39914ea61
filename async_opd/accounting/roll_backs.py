"""``roll_backs.json``: the guardrail's rollbacks of a run, which no checkpoint undoes.

Each one lowers the learning rate for the rest of the run; the checkpoints that the run goes back to
are older than it, so that they cannot hold it. It is written before a checkpoint is removed: those
that the run has left are recognized by its lineage, wherever a copy of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from async_opd.accounting.lineage import Lineage
from async_opd.core.errors import CheckpointError
from async_opd.files.foreign import Place, foreign
from async_opd.files.safe_open import write_atomically

ROLL_BACKS = "roll_backs.json"


@dataclass(frozen=True)
class RollBack:
    """The run went back because of what the guardrail found at ``step``.

    ``lineage`` is that of the run from then on; () in files of earlier versions.
    """

    step: int
    reason: str
    lineage: Lineage = ()


_RollBacks = TypeAdapter(list[RollBack])


def parse_roll_backs(content: bytes) -> list[RollBack]:
    """The content of a file. ValueError."""
    return _RollBacks.validate_json(content)


def read_roll_backs(run_dir: Place) -> list[RollBack]:
    """All rollbacks of the run, in order. CheckpointError for a file that was changed."""
    path = foreign(run_dir) / ROLL_BACKS
    try:
        return parse_roll_backs(path.read())
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
    write_roll_backs(run_dir, found)
    return len(found)


def write_roll_backs(run_dir: Path, found: Sequence[RollBack]) -> None:
    """Replaces the file. OSError."""
    write_atomically(run_dir / ROLL_BACKS, _RollBacks.dump_json(list(found), indent=1))


def lineage_of(found: Sequence[RollBack]) -> Lineage:
    """The run's lineage after the last rollback; () without one."""
    return found[-1].lineage if found else ()
