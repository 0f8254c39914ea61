"""Where one of the trainer's ranks meets the others."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankSpec:
    """One rank among ``ranks``, and where they meet; ``listener`` is rank 0's open socket.

    A collective that lasts longer than ``timeout_s`` is an error, and so are ranks of which one
    comes ``start_s`` after another. All show that they know the ``secret`` when they have met.
    """

    rank: int
    ranks: int
    host: str
    port: int
    timeout_s: float
    start_s: float
    secret: bytes = field(repr=False)
    listener: int | None = None
