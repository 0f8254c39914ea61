"""Which replica has the beginnings of which rollouts.

first piece ──replica with the fewest──► home ◄── further pieces ◄── the finished rollout, once
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Generic, TypeVar

from async_opd.core.samples import Piece

Replica = TypeVar("Replica")

REMEMBERED = 1 << 16
"""Rollouts under way, and rollouts that are finished, at least; beyond it the oldest are forgotten,
and those under way scored whole."""


class Homes(Generic[Replica]):
    """By the rollout's uid. ``remembered``: as many as may be in flight."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.used = False  # there ever was a piece
        self._remembered = max(remembered, 1)
        self._of = OrderedDict[str, Replica]()
        self._count: Counter[Replica] = Counter()
        self._finished = OrderedDict[str, None]()

    def place(self, piece: Piece, serving: Collection[Replica]) -> Replica | None:
        """Where a piece has to go.

        None if what it follows on is nowhere, and for one that comes after its rollout. If that is
        sampled once more, under the same uid, it is scored whole.
        """
        self.used = True
        home = self._leave(piece.uid)
        if piece.start == 0 and serving:
            home = min(serving, key=lambda replica: self._count[replica])
        if home is None or home not in serving or piece.uid in self._finished:
            return None
        self._of[piece.uid] = home
        self._count[home] += 1
        if len(self._of) > self._remembered:
            self._leave(next(iter(self._of)))
        return home

    def finish(self, uid: str) -> Replica | None:
        """The rollout's home, which it has no longer."""
        self._finished[uid] = None
        if len(self._finished) > self._remembered:
            self._finished.popitem(last=False)
        return self._leave(uid)

    def _leave(self, uid: str) -> Replica | None:
        home = self._of.pop(uid, None)
        if home is not None:
            self._count[home] -= 1
        return home
