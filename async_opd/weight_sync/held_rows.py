"""Rows of tokens that the trainer and every replica of the student compute, to be compared.

They are fixed, the same in every run of a model: no state has to survive a restart, and their
tokens lie evenly over the whole vocabulary, which the samples of a task do not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from async_opd.core.arrays import Int32
from async_opd.core.row import Media
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.uid import Uid, rollout_uid

LENGTHS = (2, 5, 13, 33, 75)
"""Tokens of the rows: 128 in all, of which 123 are predicted."""
MOST_ROWS = len(LENGTHS) + 1
"""Rows of a VLM student, of which one has an image; others have one row less."""
GOLDEN = (math.sqrt(5) - 1) / 2
Kind = Literal["text", "image"]
"""Whether rows have an image."""
HELD = "held"
"""Data source and teacher of the rows, which have neither."""


@dataclass(frozen=True)
class HeldRow:
    """A prompt and the ``compared`` tokens behind it, in ``ids`` int32 [T].

    Of a VLM student one row has an image: ``media``, and its ``encoded`` bytes; its prompt
    has one placeholder for it.
    """

    ids: Int32
    compared: int
    media: tuple[Media, ...] = ()
    encoded: bytes = b""

    @property
    def images(self) -> dict[str, bytes]:
        """Encoded bytes by SHA-256."""
        return {one.sha256: self.encoded for one in self.media}

    def rollout(self, prompt_ids: Int32 | None = None) -> Rollout:
        """The row as a rollout, whose response is what is compared.

        ``prompt_ids`` replace those of the prompt, such as expanded ones.
        """
        uid = Uid(f"{HELD}:0")
        ids = self.ids[: -self.compared] if prompt_ids is None else prompt_ids
        prompt = Prompt(uid, HELD, HELD, ids, media=self.media, encoded=self.images)
        return Rollout.answer(
            rollout_uid(uid, 0), prompt, self.ids[-self.compared :].tolist(), "stop"
        )


def by_kind(rows: Sequence[HeldRow]) -> dict[Kind, list[int]]:
    """Indices of the rows of text, and of those with images, of kinds that there are."""
    kinds: dict[Kind, list[int]] = {"text": [], "image": []}
    for index, row in enumerate(rows):
        kinds["image" if row.media else "text"].append(index)
    return {kind: indices for kind, indices in kinds.items() if indices}


def held_rows(vocabulary: int, longest: int, without: Collection[int] = ()) -> tuple[HeldRow, ...]:
    """The rows of text for a model: 2 to ``longest`` tokens each, all but the first compared."""
    lengths = [max(2, min(length, longest)) for length in LENGTHS]
    ids = held_ids(sum(lengths), vocabulary, without)
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    return tuple(HeldRow(one, len(one) - 1) for one in rows)


def held_ids(count: int, vocabulary: int, without: Collection[int] = ()) -> Int32:
    """So many token ids below ``vocabulary``, int32.

    The i-th is the fractional part of i times the golden ratio, times ``vocabulary``: any run of
    them lies evenly over the vocabulary. One of ``without``, such as tokens that stand for images,
    is replaced by the next one that is not.
    """
    numbers = np.arange(1, count + 1) * GOLDEN % 1.0
    ids = (numbers * vocabulary).astype(np.int32)
    for at in np.flatnonzero(np.isin(ids, list(without))):
        while int(ids[at]) in without:
            ids[at] = (ids[at] + 1) % vocabulary
    found: Int32 = ids
    return found
