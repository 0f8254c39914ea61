"""Proof that every replica of the student samples from the trainer's weights.

    trainer   snapshot(v): digests of its tensors; when due, log-probabilities of held rows
    replica   receive(v) : digests of what its engine's loader was given  ──► refuse_other_digests
              when due   : log-probabilities of the same rows, digests of ┐
                           the parameters that its engine computes with   ├─► Freshness.judge
    trainer's own log-probabilities, and their noise                      ┘

Three witnesses, since each is blind somewhere:

rows        see everything up to the sampled distribution, if it changes more than rounding does
received    see one wrong bit of what was sent, and nothing that the loader does with it
parameters  see one wrong bit of those that are sent tensors, or some joined (which ones is learned:
            ``async_opd.weight_sync.parameters``), any difference between two replicas, and
            that other matrices change when what is sent does, from the second comparison on

The rows (``async_opd.weight_sync.layout``) are fixed. Of a VLM student one has an image,
which the trainer's tower computes, and the engine's.

    trainer's and replica's log-probabilities ──► a Distance for each kind of rows
                                                  │ nats, and those that one rounding makes
    first comparison ──► RowLimits: how many roundings are normal, for each kind

Rows of text and those with images are judged apart: rounding moves them by other amounts, and the
mean of both would hide a wrong tower, or a wrong model behind a noisy tower.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from async_opd.core.errors import WeightSyncError, WrongWeights
from async_opd.core.sequence import Float32
from async_opd.weight_sync.layout import Kind, Reference, WeightMeta, by_kind
from async_opd.weight_sync.parameters import (
    PACKED,
    LearnedParameters,
    Place,
    SentTensors,
    UnlearnedMatrices,
    own_names,
)

ROWS: dict[Kind, str] = {"text": "held rows", "image": "the held row with an image"}
Receivers = Mapping[int, "Evidence"]
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


@dataclass(frozen=True)
class Evidence:
    """The weights of a replica's engine after a sync.

    ``logprobs`` are those of each row's compared tokens, float32, in nats. ``loaded`` are
    digests of its parameters, by name, one mapping for each worker. ``rounding`` is the largest
    relative error of one rounding of its dtype: 2^-4 for a quantized engine.
    """

    logprobs: tuple[Float32, ...]
    loaded: tuple[Mapping[str, str], ...]
    rounding: float


@dataclass(frozen=True)
class Verdict:
    """The replicas with wrong weights, with the reasons, and the metrics of the comparison."""

    wrong: dict[int, WrongWeights]
    metrics: dict[str, float]


def refuse_other_digests(
    replica: str, meta: WeightMeta, received: Sequence[Mapping[str, str]]
) -> None:
    """WrongWeights unless every worker's loader was given exactly the tensors of the snapshot."""
    sent = dict(zip(meta.names, meta.digests, strict=True))
    for worker, found in enumerate(received):
        wrong = [
            f"{name} {'is missing' if name not in found else 'differs'}"
            for name, digest in sent.items()
            if found.get(name) != digest
        ]
        wrong += [f"{name} was not sent" for name in found if name not in sent]
        if wrong:
            cause = f"worker {worker} was given other tensors than the trainer sent: {_few(wrong)}"
            raise WrongWeights(replica, cause, _TRANSFER)


@dataclass
class Freshness:
    """When replicas are compared with the trainer, and what the comparison says.

    ``every``: syncs between two comparisons; the first sync is always compared, the second one if
    matrices were not learned at the first, and the next one after a replica joined without a
    comparison. ``stops``: a replica with wrong weights ends the run; otherwise it is rebuilt.
    """

    every: int
    on_wrong_weights: Literal["rebuild", "stop"] = "rebuild"
    _names: tuple[str, ...] = ()
    _since: int = 0
    _owed: bool = True
    _limits: RowLimits = field(default_factory=RowLimits)
    _learned: LearnedParameters = field(default_factory=LearnedParameters)
    _unlearned: UnlearnedMatrices = field(default_factory=UnlearnedMatrices)
    _had: dict[int, frozenset[Place]] = field(default_factory=dict)
    _unequal: set[Place] = field(default_factory=set)
    _compared: bool = False
    _judging: threading.Lock = field(default_factory=threading.Lock)

    @property
    def stops(self) -> bool:
        """Whether a replica with wrong weights ends the run."""
        return self.on_wrong_weights == "stop"

    def due(self) -> bool:
        """Counts one more sync; whether its replicas are to be compared."""
        self._since += 1
        return self._owed or self._since >= self.every

    def owe(self) -> None:
        """The next sync is compared: a replica serves that was not."""
        self._owed = True

    def refuse_other_names(self, meta: WeightMeta) -> None:
        """WeightSyncError unless the trainer sends the tensors that it sent at first.

        Replicas would keep what they have of a tensor that is missing.
        """
        self._names = self._names or meta.names
        missing, new = set(self._names) - set(meta.names), set(meta.names) - set(self._names)
        if missing or new:
            wrong = [*(f"{name} is missing" for name in sorted(missing)), *sorted(new)]
            cause = f"the trainer sends other tensors than at its first sync: {_few(wrong)}"
            raise WeightSyncError("weight sync", cause, "its copy of the weights is at fault")

    def judge(self, meta: WeightMeta, evidence: Receivers) -> Verdict:
        """Compares replicas, by index, with the trainer and with each other.

        Without a reference in ``meta`` their parameters only. WeightSyncError if the reference is
        not finite. It is called on threads, of which one may still run when its caller has gone.
        """
        with self._judging:
            return self._judged(meta, evidence)

    def _judged(self, meta: WeightMeta, evidence: Receivers) -> Verdict:
        found: dict[int, Distances] = {}
        if meta.reference is not None:
            meta.reference.refuse_not_finite()
            found = {
                index: distances(meta.reference, one.logprobs, one.rounding)
                for index, one in evidence.items()
            }
        wrong = dict(self._far(found))
        shares = {index: self._limits.share(one) for index, one in found.items()}
        digests = {**dict(zip(meta.names, meta.digests, strict=True)), **meta.quantized}
        sent = SentTensors(digests, meta.frozen)
        for index, reason in self._altered(sent, evidence, shares, wrong):
            wrong.setdefault(index, reason)
        first = self._remember(sent, evidence, wrong)
        if found and not wrong:
            self._owed, self._since = first, 0
        return Verdict(wrong, self._metrics(found))

    def _metrics(self, found: Mapping[int, Distances]) -> dict[str, float]:
        metrics = {"sync/learned_parameters": float(len(self._learned.sources))}
        for index, one in found.items():
            metrics[f"sync/student/{index}/freshness_nats"] = one["text"].nats
            if "image" in one:
                metrics[f"sync/student/{index}/freshness_image_nats"] = one["image"].nats
        text = [one["text"] for one in found.values()]
        if text:
            farthest = max(text, key=lambda distance: distance.ratio)
            metrics["sync/freshness_nats"] = farthest.nats
            metrics["sync/freshness_limit_nats"] = self._limits.of("text") * farthest.unit
        images = [one["image"] for one in found.values() if "image" in one]
        if images:
            farthest = max(images, key=lambda distance: distance.ratio)
            metrics["sync/freshness_image_nats"] = farthest.nats
            metrics["sync/freshness_image_limit_nats"] = self._limits.of("image") * farthest.unit
        return metrics

    # ── rows ───────────────────────────────────────────────────────────────────────────────────

    def _far(self, found: Mapping[int, Distances]) -> Iterator[tuple[int, WrongWeights]]:
        """The replicas whose log-probabilities differ by more than rounding explains."""
        self._limits.learn(found.values())
        for index, one in found.items():
            for kind, distance in one.items():
                limit = self._limits.of(kind)
                if distance.ratio > limit:
                    cause = (
                        f"its log-probabilities of {ROWS[kind]} differ from the trainer's by "
                        f"{distance.nats:.3g} nats in the mean; rounding explains "
                        f"{limit * distance.unit:.3g}"
                    )
                    yield index, WrongWeights(f"student/{index}", cause, _LOADING)

    # ── parameters ─────────────────────────────────────────────────────────────────────────────

    def _altered(
        self,
        sent: SentTensors,
        evidence: Receivers,
        shares: Mapping[int, float],
        wrong: Mapping[int, WrongWeights],
    ) -> Iterator[tuple[int, WrongWeights]]:
        """The replicas with a parameter that is not the sent one, an older one, or a lone one."""
        sound = {i: dict(_places(one)) for i, one in evidence.items() if i not in wrong}
        unexplained = {index: self._learned.learn(found, sent) for index, found in sound.items()}
        other_form = sent.any_quantized and not self._learned.any_quantized
        for index, found in sound.items():
            if names := unexplained[index]:
                cause = (
                    "its engine quantized other weights than were sent, or quantized them "
                    f"otherwise than the trainer: {_few(names)}"
                )
                yield index, WrongWeights(f"student/{index}", cause, _LOADING)
            if other_form and not unexplained[index]:
                cause = "its engine keeps no matrix as the trainer quantizes it: nothing proves it"
                yield index, WrongWeights(f"student/{index}", cause, _QUANTIZING)
            if names := self._learned.wrong(found, sent.digests):
                cause = f"its engine computes with other weights than were sent: {_few(names)}"
                yield index, WrongWeights(f"student/{index}", cause, _LOADING)
            if gone := self._gone(index, found):
                cause = f"its engine no longer has parameters: {_few(gone)}"
                yield index, WrongWeights(f"student/{index}", cause, _LOADING)
            matrices = self._learned.other_matrices(found)
            if kept := self._unlearned.kept(index, matrices, sent, own_names(found)):
                cause = f"its engine's parameters did not change with what was sent: {_few(kept)}"
                yield index, WrongWeights(f"student/{index}", cause, _LOADING)
        yield from self._unlike_the_others(sound, shares)

    def _gone(self, index: int, found: Mapping[Place, str]) -> list[str]:
        """The parameters of the last fresh comparison that are there neither as such nor packed."""
        gone = self._had.get(index, frozenset()) - found.keys()
        return sorted(name for worker, name in gone if (worker, PACKED + name) not in found)

    def _remember(
        self, sent: SentTensors, evidence: Receivers, wrong: Mapping[int, WrongWeights]
    ) -> bool:
        """Takes the parameters of fresh replicas; whether the next sync has to be compared, too.

        Whether a matrix that is not learned follows what is sent shows in two comparisons only.
        """
        first = False
        for index, one in evidence.items():
            if index not in wrong:
                found = dict(_places(one))
                self._had[index] = frozenset(found)
                matrices = self._learned.other_matrices(found)
                first |= self._unlearned.remember(index, matrices, sent)
        return first

    def _unlike_the_others(
        self, places: Mapping[int, Mapping[Place, str]], shares: Mapping[int, float]
    ) -> Iterator[tuple[int, WrongWeights]]:
        """The replicas with a parameter that most others have otherwise.

        Parameters that differ at the first comparison of several replicas hold something else than
        weights, such as padding, and are left out. Of two replicas the farther one has the wrong
        weights.
        """
        if len(places) < 2:
            return
        by_place: dict[Place, dict[int, str]] = {}
        for index, found in places.items():
            for place, digest in found.items():
                by_place.setdefault(place, {})[index] = digest
        known = self._learned.sources.keys()
        differing = {p for p, found in by_place.items() if len(set(found.values())) > 1} - known
        if not self._compared:
            self._compared, self._unequal = True, differing
        wrong: dict[int, list[str]] = {}
        for place in sorted(differing - self._unequal):
            right = _right(by_place[place], shares)
            for index in (i for i, digest in by_place[place].items() if digest != right):
                wrong.setdefault(index, []).append(place[1])
        for index, names in wrong.items():
            cause = f"its parameters differ from those of the other replicas: {_few(names)}"
            yield index, WrongWeights(f"student/{index}", cause, _LOADING)


_TRANSFER = "the transfer or the engine's loader is at fault; sync.verify_every: 0 does not look"
_QUANTIZING = "set sync.verify_every: 0, or remove rollout.engine.quantization"
_LOADING = "the engine's loader or its kernels are at fault; sync.verify_every: 0 does not look"


def _few(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _places(evidence: Evidence) -> Iterator[tuple[Place, str]]:
    """The digests by worker and name."""
    for worker, found in enumerate(evidence.loaded):
        for name, digest in found.items():
            yield (worker, name), digest


def _right(digests: Mapping[int, str], shares: Mapping[int, float]) -> str:
    """The digest of most replicas; of several such ones that of the nearest replica."""
    votes = Counter(digests.values())
    best = min(digests, key=lambda index: (-votes[digests[index]], shares.get(index, 0.0)))
    return digests[best]
