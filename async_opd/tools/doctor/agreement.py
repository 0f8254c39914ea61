"""How far log-probabilities of the same tokens, computed in two places, are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_opd.core.sequence import Float32


@dataclass(frozen=True)
class Agreement:
    """Of ``tokens``: mean and largest absolute difference, and mean signed one, in nats."""

    tokens: int
    mean: float
    largest: float
    bias: float

    @classmethod
    def of(cls, one: Sequence[Float32], other: Sequence[Float32]) -> Agreement:
        """``bias`` is the mean of ``one`` minus ``other``. ValueError for other lengths.

        Tokens that both exclude (-inf) are equal; without any token all is 0.
        """
        pairs = list(zip(one, other, strict=True))
        if any(a.shape != b.shape for a, b in pairs):
            raise ValueError(f"{[a.shape for a, _ in pairs]} and {[b.shape for _, b in pairs]}")
        first, second = (
            np.concatenate([np.zeros(0), *(pair[at] for pair in pairs)]).astype(np.float64)
            for at in (0, 1)
        )
        differing = first != second
        apart = np.zeros(len(first))
        apart[differing] = first[differing] - second[differing]
        size = np.abs(apart)
        if not len(apart):
            return cls(0, 0.0, 0.0, 0.0)
        return cls(len(apart), float(size.mean()), float(size.max()), float(apart.mean()))

    def __str__(self) -> str:
        return (
            f"mean |Δ| {self.mean:.2g}, largest {self.largest:.2g}, bias {self.bias:+.2g} nats "
            f"over {self.tokens} tokens"
        )
