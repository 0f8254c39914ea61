"""How far a replica's log-probabilities of held rows are from the trainer's, against rounding.

    trainer's and replica's log-probabilities ──► a Distance for each kind of rows
                                                  │ nats, and those that one rounding makes
    first comparison ──► RowLimits: how many roundings are normal, for each kind

Rows of text and those with images are judged apart: rounding moves them by other amounts, and the
mean of both would hide a wrong tower, or a wrong model behind a noisy tower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_opd.core.arrays import Float32
from async_opd.weight_sync.held_rows import Kind, by_kind
from async_opd.weight_sync.layout import Reference

FIRST_RATIO = 32.0
"""Largest mean difference at a first sync, in multiples of the noise that one rounding of each
module's result makes. `python -m benchmarks.freshness` finds 1.2 of them with bfloat16 engines and
4 with float32 ones, whose sums are rounded too; the first sync measures how many a run has."""
MARGIN = 4.0
"""Largest mean difference of later syncs, in multiples of that of the first one."""


@dataclass(frozen=True)
class Distance:
    """Mean absolute difference of log-probabilities in nats: ``math.inf`` if some are not finite.

    ``unit`` is that which one rounding of each module's result makes.
    """

    nats: float
    unit: float

    @property
    def ratio(self) -> float:
        """The difference in multiples of one rounding's: infinite where that one makes none."""
        if not self.unit:
            return math.inf if self.nats else 0.0
        return self.nats / self.unit


Distances = Mapping[Kind, Distance]
"""Those of one replica."""


def distances(
    reference: Reference, logprobs: Sequence[Float32], rounding: float
) -> dict[Kind, Distance]:
    """Those of a replica from its ``logprobs`` of each row, float32, in nats, for each kind.

    The coarser rounding of trainer and engine (``rounding``) counts.
    """
    coarser = max(reference.rounding, rounding)
    same = [*map(len, reference.logprobs)] == [*map(len, logprobs)]
    found: dict[Kind, Distance] = {}
    for kind, indices in by_kind(reference.rows).items():
        nats = math.inf
        if same:
            own = np.concatenate([reference.logprobs[at] for at in indices]).astype(np.float64)
            its = np.concatenate([logprobs[at] for at in indices])
            nats = float(np.abs(own - its).mean()) if np.isfinite(its).all() else math.inf
        found[kind] = Distance(nats, reference.noise[kind] * coarser)
    return found


@dataclass
class RowLimits:
    """The largest distances that rounding explains, in multiples of one rounding's, by kind.

    The first comparison measures the ratio of the nearest replica, which bounds the others and
    every later comparison.
    """

    _first: dict[Kind, float] = field(default_factory=dict)

    def learn(self, found: Iterable[Distances]) -> None:
        """Takes the ratio of the nearest replica, of kinds that have not been compared yet."""
        ratios: dict[Kind, list[float]] = {}
        for one in found:
            for kind, distance in one.items():
                if kind not in self._first and distance.ratio <= FIRST_RATIO:
                    ratios.setdefault(kind, []).append(distance.ratio)
        self._first |= {kind: min(each) for kind, each in ratios.items()}

    def of(self, kind: Kind) -> float:
        """The limit, in multiples of one rounding's."""
        if kind not in self._first:
            return FIRST_RATIO
        return min(FIRST_RATIO, max(MARGIN * self._first[kind], 1.0))

    def share(self, one: Distances) -> float:
        """The largest distance of a replica over its limit: above 1 it is more than rounding."""
        return max(distance.ratio / self.of(kind) for kind, distance in one.items())
