"""Held rows of a VLM student: one has an image, so that its tower is compared, too.

    held_rows ──expand──► one packed row ──► the trainer's log-probabilities
    (short, with one placeholder)  ──► each replica's engine expands it by itself

See ``async_opd.weight_sync.freshness``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from async_opd.core.arrays import Int32
from async_opd.core.row import Media
from async_opd.weight_sync.held_rows import GOLDEN, HeldRow, held_ids, held_rows
from trainer.batches.packing import Row
from trainer.vision.images import Sight

BEFORE, BEHIND = 3, 32
"""Tokens before the image, and behind it, which are compared."""
WIDTH, HEIGHT = 96, 64
"""Pixels of the image; they differ, so that an engine that exchanges them is found out."""


def rows_to_hold(vocabulary: int, longest: int, sight: Sight | None) -> tuple[HeldRow, ...]:
    """The held rows for a student and its engines, of at most ``longest`` tokens.

    Without a row with an image where not even that many tokens have room for it.
    """
    if sight is None:
        return held_rows(vocabulary, longest)
    others = sight.unsampled_ids
    rows = held_rows(vocabulary, longest, others)
    ids = held_ids(BEFORE + BEHIND, vocabulary, others)
    short = np.insert(ids, BEFORE, sight.placeholder_id).astype(np.int32)
    media, encoded = picture()
    shown = HeldRow(short, BEHIND, (media,), encoded)
    fits = len(sight.expanded(shown.ids, [encoded])) <= longest
    return (*rows, shown) if fits else rows


def packed(rows: Sequence[HeldRow], sight: Sight | None) -> Row:
    """One row of all of them, with their images, on the CPU. StageError as Sight.of."""
    rollouts = [row.rollout(_prompt_of(row, sight)) for row in rows]
    ids = [one.token_ids for one in rollouts]
    made = Row.of(ids, [np.arange(len(one)) for one in ids])
    encoded = {sha256: each for row in rows for sha256, each in row.images.items()}
    if sight is None or not encoded:
        return made
    return replace(made, images=sight.of(rollouts, encoded))


def picture() -> tuple[Media, bytes]:
    """The image, encoded as PNG: waves of another direction and length in each color."""
    from io import BytesIO

    from PIL import Image

    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin(GOLDEN * (x * (1 + color) / 4 + y * (3 - color) / 5)) for color in range(3)]
    pixels = (127.5 * (1 + np.stack(waves, -1))).astype(np.uint8)
    made = BytesIO()
    Image.fromarray(pixels).save(made, "PNG")
    encoded = made.getvalue()
    sha256 = hashlib.sha256(encoded).hexdigest()
    return Media(sha256, len(encoded), WIDTH, HEIGHT), encoded


def _prompt_of(row: HeldRow, sight: Sight | None) -> Int32 | None:
    """The expanded prompt of a row with an image."""
    if sight is None or not row.media:
        return None
    return sight.expanded(row.ids[: -row.compared], [row.encoded])
