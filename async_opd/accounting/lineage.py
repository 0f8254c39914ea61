"""The lineage of a run: where its training began, and where it went back and began again.

    a process starts, the trainer is restarted, a rollback ──► one more ``Beginning``

A checkpoint has the lineage that the run had then, and it is on the way of a later lineage if that
one continues it and has never gone back to before the checkpoint's step. Of two machines that go on
from one checkpoint neither lineage continues the other: the ids are random.

``roll_backs.json`` has the guardrail's rollbacks of a run, which no checkpoint undoes.
Each one lowers the learning rate for the rest of the run; the checkpoints that the run goes back to
are older than it, so that they cannot hold it. It is written before a checkpoint is removed: those
that the run has left are recognized by its lineage, wherever a copy of them is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from pydantic import TypeAdapter, ValidationError

from async_opd.core.errors import CheckpointError
from async_opd.files.foreign import Place, foreign
from async_opd.files.safe_open import write_atomically


@dataclass(frozen=True)
class Beginning:
    """Training began after step ``after``: 0 at the run's start.

    ``replica``: that of the student whose weights the trainer began with; '': those of a
    checkpoint, or the student's own.
    """

    id: str
    after: int
    replica: str = ""


Lineage = tuple[Beginning, ...]
"""Beginnings in the order of time; none in checkpoints of earlier versions of async_opd."""


def begun_after(step: int, before: Lineage, replica: str = "") -> Lineage:
    """The lineage of a run that goes on after the step, under a new id."""
    return (*before, Beginning(token_hex(8), step, replica))


def continues(later: Lineage, before: Lineage) -> bool:
    """Whether ``later`` is ``before``, or what came after it."""
    return later[: len(before)] == before


def is_on_the_way(step: int, its: Lineage, later: Lineage) -> bool:
    """Whether ``later`` continues ``its``, and has not gone back to before the step since."""
    return continues(later, its) and all(one.after >= step for one in later[len(its) :])


def was_left(step: int, its: Lineage, later: Lineage) -> bool:
    """Whether ``later`` continues ``its``, and has gone back to before the step since."""
    return continues(later, its) and not is_on_the_way(step, its, later)


def longest(lineages: Iterable[Lineage]) -> Lineage:
    """The one that continues all others, if any does; () of none."""
    return max(lineages, key=len, default=())


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
