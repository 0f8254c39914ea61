"""Which parameters of an engine are which sent tensors, learned from their digests.

    sent      q_proj.weight, k_proj.weight, v_proj.weight     o_proj.weight
                   └───────────────┼───────────────┘               │
    parameter                 qkv_proj.weight                 o_proj.weight     equal digests

An engine joins some tensors along their first dimension, and gives others another name; a parameter
that it divides, pads or converts is not learned. Once learned, a parameter has to follow what is
sent. Matrices that are not learned have to change between two comparisons when what is sent does,
but for those of a frozen tower or projector, which are not sent.

Of an engine that quantizes what it is sent, the trainer gives the digests of the quantized tensors
beside those of the sent ones: each quantized parameter has to be some of them, from the first
comparison on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import permutations

from async_opd.weight_sync.digests import joined

PACKED = "packed "
"""Prefix of the name of a parameter that a kernel has packed away; its digest is from before."""
QUANTIZED = "quantized "
"""Prefix of the name of a sent tensor whose digest is that of its quantized numbers or scales."""
MOST_JOINED = 3
"""Tensors that are joined into one parameter at most: query, key and value."""
MOST_BESIDE = 8
"""Tensors beside each other among which joined ones are looked for: 392 permutations at most."""

Place = tuple[int, str]
"""A worker, and the name of one of its parameters."""


class SentTensors:
    """The digests of what was sent, by name; also the names by digest and by module.

    ``frozen`` names the student's other tensors, which engines have from its own files. Those with
    ``QUANTIZED`` before the name are how a quantized engine keeps what it was sent.
    """

    def __init__(self, digests: Mapping[str, str], frozen: Collection[str] = ()) -> None:
        self.digests = digests
        self._sent_modules = _Modules(digests if frozen else ())
        self._frozen_modules = _Modules(frozen)
        self._named: dict[str, list[str]] = defaultdict(list)
        self._under: dict[str, list[str]] = defaultdict(list)
        self._beside: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._matrices: list[str] = []
        self._dtypes: set[str] = set()
        self._quantized: set[tuple[str, str]] = set()
        for name, digest in digests.items():
            self._named[digest].append(name)
            self._beside[_beside(name)].append(name)
            if name.startswith(QUANTIZED):
                self._quantized.add(_form(name, digest))
                continue
            if not is_matrix(digest):
                continue
            self._matrices.append(name)
            self._dtypes.add(_dtype(digest))
            module = name
            while module := module.rpartition(".")[0]:
                self._under[module].append(name)

    def frozen(self, name: str) -> bool:
        """Whether a parameter of the engine is of a module of which nothing is sent.

        An engine may call the outermost modules otherwise, and join modules beside each other.
        """
        module = name.rpartition(".")[0]
        for around in (module, module.rpartition(".")[0]):
            if around in self._sent_modules:
                return False
            if around in self._frozen_modules:
                return True
        return False

    def explanations(self, name: str, digest: str) -> Iterator[tuple[str, ...]]:
        """Tensors that have the digest: the one of that name; without it, another, or several."""
        if own := [one for one in (name, QUANTIZED + name) if one in self.digests]:
            yield from ((one,) for one in own if self.digests[one] == digest)
            return
        for other in self._named.get(digest, ()):
            yield (other,)
        # joined tensors lie beside each other: model.layers.0.mlp.{gate_proj, up_proj}.weight
        for prefix in ("", QUANTIZED):
            beside = self._beside.get(_beside(prefix + name), [])
            if len(beside) > MOST_BESIDE:
                continue
            for count in range(2, MOST_JOINED + 1):
                for names in permutations(beside, count):
                    if joined([self.digests[n] for n in names]) == digest:
                        yield names

    @property
    def any_quantized(self) -> bool:
        """Whether the trainer quantizes what it sends by the engines' arithmetic."""
        return bool(self._quantized)

    def quantized(self, name: str, digest: str) -> bool:
        """Whether a parameter is one that the engine makes by quantizing what it is sent."""
        return _form(name, digest) in self._quantized and not self.frozen(name)

    def changed(self, name: str, own: AbstractSet[str], before: SentTensors) -> bool:
        """Whether the tensors that a parameter of the engine is made of are others than before.

        They are the one of its name; without it, matrices under its module or the module around it
        that are not parameters by themselves, as the names of all parameters, ``own``, show. If the
        engine names its modules otherwise, every matrix has to be another than before.
        """
        if name in self.digests:
            return self._differs(name, before)
        module = name.rpartition(".")[0]
        for around in (module, module.rpartition(".")[0]):
            if parts := [part for part in self._under.get(around, ()) if part not in own]:
                return any(self._differs(part, before) for part in parts)
        if self.frozen(name):
            return False
        differ = [self._differs(part, before) for part in self._matrices]
        return bool(differ) and all(differ)

    def has_like(self, name: str, digest: str) -> bool:
        """Whether a tensor of that name was sent with the dtype and shape of the digest."""
        return name in self.digests and _kind(self.digests[name]) == _kind(digest)

    def has_dtype(self, digest: str) -> bool:
        """Whether a matrix was sent in the dtype of the digest."""
        return _dtype(digest) in self._dtypes

    def _differs(self, name: str, before: SentTensors) -> bool:
        return self.digests[name] != before.digests.get(name)


class _Modules:
    """The modules that tensors are directly in, and those around these; found by their last parts.

    ``visual.blocks.0.attn`` is found where a tensor is ``model.visual.blocks.0.attn.qkv.weight``,
    and the other way round.
    """

    def __init__(self, names: Iterable[str]) -> None:
        modules = {name.rpartition(".")[0] for name in names}
        self._whole = modules | {module.rpartition(".")[0] for module in modules}
        self._ends = {end for module in self._whole for end in _ends(module)}

    def __contains__(self, module: str) -> bool:
        return module in self._ends or not self._whole.isdisjoint(_ends(module))


def _ends(module: str) -> Iterator[str]:
    """The module's name, and what is left of it without its outermost modules."""
    while module:
        yield module
        module = module.partition(".")[2]


@dataclass
class LearnedParameters:
    """The places whose digests were equal to those of sent tensors, and of which ones."""

    sources: dict[Place, tuple[str, ...]] = field(default_factory=dict)

    def learn(self, found: Mapping[Place, str], sent: SentTensors) -> list[str]:
        """Learns places that have exactly one explanation; returns quantized ones without one.

        Two equal tensors, such as the biases of a new model, explain a place twice: it is learned
        at a later sync. A norm of ones of a frozen tower is equal to a sent one by chance.
        """
        unexplained = []
        for place in found.keys() - self.sources.keys():
            if sent.frozen(_name(place)):
                continue
            explanations = list(sent.explanations(_name(place), found[place]))
            if len(explanations) == 1:
                self.sources[place] = explanations[0]
            elif not explanations and sent.quantized(place[1], found[place]):
                unexplained.append(place[1])
        return sorted(unexplained)

    @property
    def any_quantized(self) -> bool:
        """Whether a quantized matrix was learned; a scale alone proves none."""
        return any(
            name.startswith(QUANTIZED) and not name.endswith("_scale")
            for names in self.sources.values()
            for name in names
        )

    def wrong(self, found: Mapping[Place, str], sent: Mapping[str, str]) -> list[str]:
        """The names of learned parameters that are not what was sent for them."""
        return sorted(
            place[1]
            for place, names in self.sources.items()
            if found.get(place) != _digest_of(names, sent)
        )

    def other_matrices(self, found: Mapping[Place, str]) -> dict[Place, str]:
        """The matrices that are not learned, for instance those that tensor parallelism divides.

        Without those of which kernels use a packed copy, which has a separate place.
        """
        return {
            place: digest
            for place, digest in found.items()
            if place not in self.sources and is_matrix(digest)
            if (place[0], PACKED + place[1]) not in found
        }


@dataclass
class UnlearnedMatrices:
    """By replica: its matrices that were not learned, when it was last fresh, and what was sent.

    A new incarnation of a replica is compared with the last one: a loader that ignores updates
    leaves both with the weights from the disk.
    """

    before: dict[int, tuple[dict[Place, str], SentTensors]] = field(default_factory=dict)

    def remember(self, replica: int, matrices: dict[Place, str], sent: SentTensors) -> bool:
        """Takes what a fresh replica has. Whether it has some, and none was known before."""
        first = bool(matrices) and replica not in self.before
        self.before[replica] = matrices, sent
        return first

    def kept(
        self, replica: int, matrices: Mapping[Place, str], sent: SentTensors, own: AbstractSet[str]
    ) -> list[str]:
        """The names of those that are as before, although what was sent for them is not.

        All of them, if no matrix changed. If some did, those of a kind, such as the fused experts
        of all layers in all workers, of which none did: a change in one of them may be another
        worker's part, or lost by rounding it to another dtype. One that has the name, dtype and
        shape of a sent tensor is a kind by itself.
        """
        if replica not in self.before:
            return []
        had, sent_before = self.before[replica]
        due = [p for p in matrices.keys() & had.keys() if sent.changed(_name(p), own, sent_before)]
        kept = {place for place in due if matrices[place] == had[place]}
        if len(kept) < len(due):
            kinds: dict[str, set[Place]] = defaultdict(set)
            for place in due:
                if sent.has_like(_name(place), matrices[place]):
                    kinds[str(place)].add(place)
                elif sent.has_dtype(matrices[place]):
                    kinds[_LAYER.sub(".#.", _name(place))].add(place)
            kept = {place for places in kinds.values() if places <= kept for place in places}
        return sorted({place[1] for place in kept})


_LAYER = re.compile(r"\.\d+\.")


def is_matrix(digest: str) -> bool:
    """Whether the tensor of a digest has two dimensions or more."""
    return "," in _kind(digest)


def own_names(found: Mapping[Place, str]) -> set[str]:
    """The names of an engine's parameters."""
    return {_name(place) for place in found}


def _form(name: str, digest: str) -> tuple[str, str]:
    """The last part of a tensor's name, and its dtype: those of scales are ``weight_scale``."""
    return name.rpartition(".")[2], _dtype(digest)


def _name(place: Place) -> str:
    return place[1].removeprefix(PACKED)


def _kind(digest: str) -> str:
    """Dtype and shape."""
    return digest.partition(":")[0]


def _dtype(digest: str) -> str:
    return digest.partition("[")[0]


def _beside(name: str) -> tuple[str, str]:
    """The common part of the names of tensors beside each other: all but the module's own name."""
    module, _, kind = name.rpartition(".")
    return module.rpartition(".")[0], kind


def _digest_of(names: tuple[str, ...], sent: Mapping[str, str]) -> str | None:
    parts = [sent[name] for name in names if name in sent]
    return None if len(parts) < len(names) else parts[0] if len(parts) == 1 else joined(parts)
