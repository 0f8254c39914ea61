"""Weights of teachers by their gaps and tokens (``teachers.<name>.weight: auto``).

    headers ──masses──────────────┐
    step's gaps ──mean, smoothed──┴──► weight of each teacher ──► factors of the next step's tokens

A teacher's gap g is the mean over its response tokens of log q - log p, in nats: an estimate of
KL(q ‖ p). Its mass m is its share of the batch's weights if all teachers weighed the same: of the
response tokens under ``token_mean``, of the samples under ``seq_mean_token_mean``. With the gap G
of its first steps, a token of it weighs, relative to those of other teachers,

    a = (g / G) / (m G)

so that the step descends ½ Σ (g / G)²: every teacher counts by the share of its gap that is left,
whatever its gap and its tokens are, and those that are behind count more.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_opd.core.samples import Header
    from async_opd.core.uid import Uid
    from trainer.batches.token_weights import TokenWeighting

SMOOTHED = 10
"""Steps with tokens of a teacher over which its first gap is a mean. From then on gap and mass
are exponential means, in which the newest step has the weight 1 / SMOOTHED."""
LARGEST_RATIO = 64.0
"""Most that a token of one teacher weighs, by the least that a token of another does."""
SMALLEST_GAP = 1 / 16
"""Least first gap of a teacher, by the largest of all teachers: below it are teachers that agree
with the student, whose gaps are noise. Also the least share of a gap that counts as left."""


@dataclass(frozen=True)
class TeacherStats:
    """A teacher's smoothed ``mass`` and ``gap``, and in how many steps they were seen.

    ``first`` is the gap's mean over the first ``SMOOTHED`` steps that have it.
    """

    masses: int = 0
    mass: float = 0.0
    gaps: int = 0
    gap: float = 0.0
    first: float = 0.0

    def with_mass(self, mass: float) -> TeacherStats:
        """After a batch of which it had this mass, 0 for a batch without it."""
        count = self.masses + 1
        return replace(self, masses=count, mass=_moved(self.mass, mass, count))

    def with_gap(self, gap: float) -> TeacherStats:
        """After a step with tokens of it, which had this gap in nats."""
        count, mean = self.gaps + 1, _moved(self.gap, gap, self.gaps + 1)
        return replace(self, gaps=count, gap=mean, first=mean if count <= SMOOTHED else self.first)


@dataclass(frozen=True)
class Balance:
    """The statistics of each teacher before a step; steps make new ones."""

    seen: Mapping[str, TeacherStats] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Balance:
        """From ``text()``; '' is that of a run's start."""
        return cls({name: TeacherStats(**one) for name, one in json.loads(text or "{}").items()})

    def text(self) -> str:
        """All of it as JSON, whose numbers are exact; '' at a run's start."""
        seen = {name: asdict(one) for name, one in self.seen.items()}
        return json.dumps(seen, sort_keys=True) if seen else ""

    def with_masses(self, masses: Mapping[str, float]) -> Balance:
        """With the masses of a batch, which add up to 1 (see ``masses_of``)."""
        if not masses:
            return self
        names = sorted(self.seen.keys() | masses.keys())
        every = {name: self.seen.get(name, TeacherStats()) for name in names}
        return Balance({name: one.with_mass(masses.get(name, 0.0)) for name, one in every.items()})

    def with_gaps(self, metrics: Mapping[str, float]) -> Balance:
        """With the gaps of a step that was applied, from its metrics ``teacher/<name>/gap``.

        A gap that is infinite, of a token that the teacher never says, is left out.
        """
        found = {name: metrics.get(f"teacher/{name}/gap", math.nan) for name in self.seen}
        return Balance(
            {
                name: one.with_gap(found[name]) if math.isfinite(found[name]) else one
                for name, one in self.seen.items()
            }
        )

    def weights(self) -> dict[str, float]:
        """The weight of a token of each teacher, by the mean over all tokens of smoothed masses.

        Of a teacher whose gap was not seen yet, masses alone decide, and others' mean first gap.
        """
        seen = {name: one for name, one in self.seen.items() if one.mass > 0}
        known = [one.first for one in seen.values() if one.gaps]
        least = max(max(known, default=1.0), 1e-6) * SMALLEST_GAP
        firsts = [max(first, least) for first in known]
        usual = sum(firsts) / len(firsts) if firsts else 1.0
        raw = {}
        for name, one in seen.items():
            first = max(one.first, least) if one.gaps else usual
            left = min(max(one.gap / first, SMALLEST_GAP), 1.0) if one.gaps else 1.0
            raw[name] = left / (one.mass * first)
        most = min(raw.values(), default=0.0) * LARGEST_RATIO
        bounded = {name: min(one, most) for name, one in raw.items()}
        masses = sum(one.mass for one in seen.values())
        mean = sum(one * seen[name].mass for name, one in bounded.items()) / (masses or 1.0)
        return {name: one / mean for name, one in bounded.items()}


def _moved(mean: float, value: float, count: int) -> float:
    """The mean of ``count`` values of which ``value`` is the last, exponential beyond SMOOTHED."""
    return mean + (value - mean) / min(count, SMOOTHED)


class Balancing:
    """Gives the learner each step's factors of token weights; none unless ``weighting.auto``."""

    def __init__(self, weighting: TokenWeighting) -> None:
        self.weighting = weighting
        self.balance = Balance()
        self._next = self.balance
        self._weights: dict[str, float] = {}

    def factors(self, headers: Sequence[Header], oldest: int = 0) -> dict[Uid, float]:
        """Factors, by uid, of the planned distillation weights of samples; 1 of all others.

        It depends on the steps before and on this batch's headers alone. The total of the weights
        is that of the reduction with these weights of teachers, over tokens of version ``oldest``
        and later ones.
        """
        self._next, self._weights = self.balance, {}
        weighting = self.weighting
        if not (weighting.auto or oldest):
            return {}
        planned = weighting(headers)[0]
        if weighting.auto:
            weights = [one.weight for one in weighting(headers, oldest)[0]]
            self._next = self.balance.with_masses(masses_of(headers, weights, oldest))
            self._weights = self._next.weights()
            weighting = replace(weighting, teachers=self._weights)
        return {
            header.uid: new.weight / old.weight
            for header, old, new in zip(
                headers, planned, weighting(headers, oldest)[0], strict=True
            )
            if old.weight and header.response_tokens and new.weight != old.weight
        }

    def trained(self, metrics: Mapping[str, float], fault: str) -> dict[str, float]:
        """Takes the gaps of the step, unless it was skipped; the weights that it had as metrics."""
        self.balance = self._next if fault or not self._weights else self._next.with_gaps(metrics)
        return {f"teacher/{name}/weight": weight for name, weight in self._weights.items()}


def masses_of(
    headers: Sequence[Header], weights: Sequence[float], oldest: int = 0
) -> dict[str, float]:
    """Each teacher's share of the sum of ``weights`` of tokens of version ``oldest`` and later."""
    sums: defaultdict[str, float] = defaultdict(float)
    for header, weight in zip(headers, weights, strict=True):
        sums[header.teacher] += weight * header.tokens_since(oldest)
    total = sum(sums.values())
    return {name: value / total for name, value in sorted(sums.items())} if total else {}
