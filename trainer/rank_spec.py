"""The address and the timeouts by which one of the trainer's ranks connects to the others."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankSpec:
    """One rank among ``ranks``, and rank 0's address; ``listener`` is rank 0's open socket.

    A collective that lasts longer than ``timeout_s`` seconds is an error, and so is a rank that
    connects more than ``start_s`` seconds after another. Connected ranks prove to each other that
    they know the ``secret``.
    """

    rank: int
    ranks: int
    host: str
    port: int
    timeout_s: float
    start_s: float
    secret: bytes = field(repr=False)
    listener: int | None = None
