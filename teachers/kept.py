"""Rows that a replica has scored of rollouts that are not finished yet.

    piece ──begun──► tokens so far ──engine──► rows ──keep──► kept ──take──► the finished rollout's

A row belongs to the tokens before it and to those it scores: it is only ever given for the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from async_opd.core.samples import Int32

MOST_BYTES = 4 << 30
"""What a replica keeps. Beyond it nothing new is kept: what is under way is worth more."""
STALE_S = 600.0
"""Who was not heard of for so long will not be finished here."""

Rows = NDArray[Any]


@dataclass
class Begun:
    """A rollout's beginning: the prompt, the tokens asked for [n, columns], and their rows.

    ``closed``: it gets no more of them.
    """

    prompt: Int32
    ids: Int32
    rows: list[Rows] = field(default_factory=list)
    closed: bool = False
    touched: float = 0.0

    @property
    def known(self) -> int:
        """Response tokens whose rows are there."""
        return sum(len(rows) for rows in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.prompt.nbytes + self.ids.nbytes + sum(rows.nbytes for rows in self.rows)

    def for_(self, prompt: Int32, ids: Int32) -> Rows | None:
        """The rows of as many tokens as are the same; None if there are none."""
        if not self.rows or not np.array_equal(prompt, self.prompt):
            return None
        shared = min(len(ids), self.known)
        same = (ids[:shared] == self.ids[:shared]).all(axis=1)
        count = shared if same.all() else int(same.argmin())
        return np.concatenate(self.rows)[:count] if count else None


class Kept:
    """Beginnings by the rollout's uid. ``scored`` and ``used`` count rows."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scored = 0
        self.used = 0
        self._most_bytes = most_bytes
        self._clock = clock
        self._begun: OrderedDict[str, Begun] = OrderedDict()
        self._nbytes = 0
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, uid: str) -> asyncio.Lock:
        """Whoever scores a rollout or a piece of it holds this, so that no row is scored twice."""
        return self._turns.setdefault(uid, asyncio.Lock())

    def begun(self, uid: str, start: int, prompt: Int32, ids: Int32) -> Begun | None:
        """All tokens up to a piece that begins at ``start``, and the rows there are.

        None if some in between are missing: what never came, or was not kept, is not made up for.
        """
        if not start:
            self.drop(uid)
            return Begun(prompt, ids)
        found = self._begun.get(uid)
        if found is None or found.closed or found.known != start:
            return None
        return Begun(found.prompt, np.concatenate([found.ids, ids]), found.rows)

    def keep(self, uid: str, begun: Begun, rows: Rows, *, closed: bool = False) -> None:
        """Further rows. Without room for them, none of the rollout's are left.

        ``closed``: these are the last.
        """
        self.drop(uid)
        self.scored += len(rows)
        now = self._clock()
        grown = Begun(begun.prompt, begun.ids, [*begun.rows, rows], closed, now)
        self._forget_the_stale(now)
        if self._nbytes + grown.nbytes <= self._most_bytes:
            self._begun[uid] = grown
            self._nbytes += grown.nbytes

    def take(self, uid: str, prompt: Int32, ids: Int32) -> Rows | None:
        """The finished rollout's first rows, if there are any; they are kept no longer."""
        begun = self.drop(uid)
        rows = None if begun is None else begun.for_(prompt, ids)
        self.used += 0 if rows is None else len(rows)
        return rows

    def drop(self, uid: str) -> Begun | None:
        """Forgets the rollout."""
        begun = self._begun.pop(uid, None)
        if begun is not None:
            self._nbytes -= begun.nbytes
        return begun

    def drain(self) -> dict[str, float]:
        """Rows scored ahead and rows of use since the last time; nothing if there were none."""
        found = {"early_rows": float(self.scored), "early_used": float(self.used)}
        self.scored = self.used = 0
        return found if any(found.values()) else {}

    def _forget_the_stale(self, now: float) -> None:
        while self._begun:
            uid, oldest = next(iter(self._begun.items()))
            if now - oldest.touched < STALE_S:
                return
            self.drop(uid)
