"""The lineage of a run: where its training began, and where it went back and began again.

    a process starts, the trainer is restarted, a rollback ──► one more ``Beginning``

A checkpoint has the lineage that the run had then, and it is on the way of a later lineage if that
one continues it and has never gone back to before the checkpoint's step. Of two machines that go on
from one checkpoint neither lineage continues the other: the ids are random.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from secrets import token_hex


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
