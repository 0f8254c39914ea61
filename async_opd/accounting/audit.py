"""The audit of a run directory checks that every admitted sample was trained exactly once.

ledger.jsonl ──► trained · lost · duplicated · dead-lettered · in flight
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_opd.accounting.journal import LEDGER
from async_opd.core.errors import AsyncOPDError
from async_opd.files.foreign import RECORD_BYTES, ForeignPath, Place, foreign
from async_opd.files.run_format import refuse_other_formats


class AuditError(AsyncOPDError):
    """A run directory whose journal cannot be read."""


@dataclass(frozen=True)
class Audit:
    """Uids of samples, a uid as often as it occurred.

    A sample's outcome is trained or dead-lettered. ``trained`` is in the order of training;
    ``lost`` samples were admitted and have no outcome although the run is completed, ``in_flight``
    samples have none yet; ``duplicated`` ones have more outcomes than admissions.
    """

    trained: tuple[str, ...]
    lost: tuple[str, ...]
    duplicated: tuple[str, ...]
    dead_lettered: tuple[str, ...]
    in_flight: tuple[str, ...]
    steps: int


def audit(run_dir: str | Place) -> Audit:
    """Reads the journal and the summary of a run.

    The last line is ignored if it is torn: the driver was killed while it wrote it. AuditError;
    ConfigError for a run directory of another format.
    """
    folder = foreign(Path(run_dir) if isinstance(run_dir, str) else run_dir)
    refuse_other_formats(folder)
    admitted: Counter[str] = Counter()
    trained: list[str] = []
    dead: list[str] = []
    steps = 0
    for entry in journal_entries(folder / LEDGER):
        admitted.update(entry.get("admitted", ()))
        trained += entry.get("trained", ())
        dead += entry.get("dead", ())
        steps = max(steps, entry.get("step", 0))
    outcomes = Counter(trained) + Counter(dead)
    open_ = tuple((admitted - outcomes).elements())
    completed = _completed(folder)
    return Audit(
        trained=tuple(trained),
        lost=open_ if completed else (),
        duplicated=tuple((outcomes - admitted).elements()),
        dead_lettered=tuple(dead),
        in_flight=() if completed else open_,
        steps=steps,
    )


def journal_entries(path: ForeignPath) -> Iterator[dict[str, Any]]:
    """Each line of a journal. AuditError."""
    number = 0
    try:
        for number, line in enumerate(path.lines(RECORD_BYTES), 1):  # noqa: B007
            if line.endswith("\n"):  # a last line without a newline is torn
                yield _checked(dict(json.loads(line)))
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise AuditError(f"{path}, line {number}, is not an entry of a journal: {error}") from error


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """ValueError for a list of samples that are not texts, or a step that is not a number."""
    for key in ("admitted", "trained", "dead"):
        uids = entry.get(key, [])
        if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
            raise ValueError(f"{key} is not a list of texts")
    if type(entry.get("step", 0)) is not int:
        raise ValueError("step is not a whole number")
    return entry


def _completed(folder: ForeignPath) -> bool:
    try:
        return bool(json.loads((folder / "summary.json").read())["status"] == "completed")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
