"""Where a step that was computed again first differs from what the run did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.replay.kept_step import Record
    from trainer.replay.replayer import DifferentWeights, Recomputed

FIRST = ("loss/total", "train/grad_norm")
"""Of the results that differ these are named first: a step computes them in this order."""
VERSIONS = ("async-opd", "torch", "transformers", "peft", "torchao")


@dataclass(frozen=True)
class DifferentNumber:
    """A result of a step; ``difference`` is the absolute one."""

    name: str
    recorded: float
    computed: float
    difference: float


@dataclass(frozen=True)
class Difference:
    """The difference in the first step that has one: results by FIRST and name, weights by rank."""

    step: int
    numbers: tuple[DifferentNumber, ...]
    weights: tuple[DifferentWeights, ...]
    skipped: str = ""

    def lines(self) -> Iterator[str]:
        """It in words, what was computed first of all first."""
        yield f"the first difference is in step {self.step}"
        if self.skipped:
            yield f"  {self.skipped}"
        for one in self.numbers:
            yield (
                f"  {one.name}: the run had {one.recorded:.9g}, now it is {one.computed:.9g}, "
                f"difference {one.difference:.3g}"
            )
        for found in self.weights:
            yield (
                f"  weights of rank {found.rank}: {found.count} of {found.total} tensors differ, "
                f"first {found.first}, by up to {found.largest:.3g} in its compared entries"
            )


def difference(record: Record, now: Recomputed) -> Difference | None:
    """How a step differs from the record of rank 0; None if all bits are equal.

    Results that only one of both has are not differences: see ``incomparable``.
    """
    before = record.result
    names = sorted(
        before.quantities.keys() & now.quantities.keys(),
        key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name),
    )
    numbers = tuple(
        _number(name, before.quantities[name], now.quantities[name])
        for name in names
        if before.quantities[name] != now.quantities[name]
    )
    skipped = ""
    if before.skipped != now.skipped:
        words = [text or "the step was applied" for text in (before.skipped, now.skipped)]
        skipped = f"skipped: in the run {words[0]}, now {words[1]}"
    if not (numbers or skipped or now.weights):
        return None
    return Difference(now.step, numbers, now.weights, skipped)


def incomparable(record: Record, now: Recomputed) -> list[str]:
    """Results that only one of both has, in words: another version has other metrics."""
    before, after = record.result.quantities.keys(), now.quantities.keys()
    sides = (("the run", before - after), ("this version", after - before))
    return [
        f"only {side} has {len(names)} results, such as {min(names)}: they are not compared"
        for side, names in sides
        if names
    ]


def other_kernels(records: Sequence[Record], now: Recomputed) -> list[str]:
    """Parts of the ranks that ran compiled in one of both and eagerly in the other, in words.

    Their results differ in the last bits. The choice is made by measured times.
    """
    return [
        f"{name} of rank {record.rank}: {was} in the run, {here.get(name, 'eager')} now; a "
        "difference may come from there"
        for record, here in zip(records, now.kernels, strict=True)
        for name, was in record.kernels.items()
        if was != here.get(name, "eager")
    ]


def platform_faults(
    recorded: Sequence[Record], now: Sequence[dict[str, str]]
) -> tuple[list[str], list[str]]:
    """Differences between the machines: reasons to refuse, and warnings (versions)."""
    refused: list[str] = []
    warned: list[str] = []
    if len(recorded) != len(now):
        refused.append(f"the run had {len(recorded)} ranks, here are {len(now)}")
    for record, here in zip(recorded, now, strict=False):
        for key in sorted(record.platform.keys() | here.keys()):
            was, is_ = record.platform.get(key, "none"), here.get(key, "none")
            if was != is_:
                words = f"{key} of rank {record.rank}: the run had {was}, here is {is_}"
                (warned if key in VERSIONS else refused).append(words)
    return refused, warned


def _number(name: str, recorded: str, computed: str) -> DifferentNumber:
    before, now = float.fromhex(recorded), float.fromhex(computed)
    apart = abs(before - now)
    return DifferentNumber(name, before, now, apart if math.isfinite(apart) else math.inf)
