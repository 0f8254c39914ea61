"""Which parameters of an engine are which sent tensors, learned from their digests.

    sent      q_proj.weight, k_proj.weight, v_proj.weight     o_proj.weight
                   └───────────────┼───────────────┘               │
    parameter                 qkv_proj.weight                 o_proj.weight     equal digests

An engine joins some tensors along their first dimension, and gives others another name; what it
divides, pads or converts is not learned. Once learned, a parameter has to follow what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations

from async_opd.weight_sync.digests import joined

PACKED = "packed "
"""Prefix of the name of a parameter that a kernel has packed away; its digest is from before."""
MOST_JOINED = 3
"""Tensors that are joined into one parameter at most: query, key and value."""

Place = tuple[int, str]
"""A worker, and the name of one of its parameters."""


@dataclass
class LearnedParameters:
    """The places whose digests were equal to those of sent tensors, and of which ones."""

    sources: dict[Place, tuple[str, ...]] = field(default_factory=dict)

    def learn(self, found: Mapping[Place, str], sent: Mapping[str, str]) -> None:
        """Learns places that have exactly one explanation.

        Two equal tensors, such as the biases of a new model, explain a place twice: it is learned
        at a later sync.
        """
        for place in found.keys() - self.sources.keys():
            explanations = list(_explanations(place[1].removeprefix(PACKED), found[place], sent))
            if len(explanations) == 1:
                self.sources[place] = explanations[0]

    def wrong(self, found: Mapping[Place, str], sent: Mapping[str, str]) -> list[str]:
        """The names of learned parameters that are not what was sent for them."""
        return sorted(
            place[1]
            for place, names in self.sources.items()
            if found.get(place) != _digest_of(names, sent)
        )


def _digest_of(names: tuple[str, ...], sent: Mapping[str, str]) -> str | None:
    parts = [sent[name] for name in names if name in sent]
    return None if len(parts) < len(names) else parts[0] if len(parts) == 1 else joined(parts)


def _explanations(name: str, digest: str, sent: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Sent tensors that have the digest: the one of that name; without it, another, or several."""
    if name in sent:
        if sent[name] == digest:
            yield (name,)
        return
    for other, its in sent.items():
        if its == digest:
            yield (other,)
    # joined tensors lie beside each other: model.layers.0.mlp.{gate_proj, up_proj}.weight
    parent, kind = name.rpartition(".")[0].rpartition(".")[0] + ".", name.rpartition(".")[2]
    beside = [n for n in sent if n.startswith(parent) and n.endswith(f".{kind}")]
    beside = [n for n in beside if n.count(".") == name.count(".")]
    for count in range(2, MOST_JOINED + 1):
        for names in permutations(beside, count):
            if joined([sent[n] for n in names]) == digest:
                yield names
