"""In what AdamW's two moments are kept, and the bytes that they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Moments = Literal["float32", "bfloat16", "8bit"]
"""As ``train.moments``."""
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
SMALLEST_TENSOR = 4096
"""Entries of a tensor below which its moments stay in float32, as in bitsandbytes and torchao."""


def block_of(shape: Sequence[int]) -> int | None:
    """Entries that share one scale in 8 bits; None for a tensor whose moments stay in float32.

    Blocks lie within rows, so that however many ranks divide the rows, no block is divided.
    """
    if len(shape) < 2 or math.prod(shape) < SMALLEST_TENSOR:
        return None
    block = math.gcd(LARGEST_BLOCK, shape[-1])
    return block if block >= SMALLEST_BLOCK else None


def moment_bytes(moments: Moments, shape: Sequence[int]) -> int:
    """Bytes of both moments of a parameter of this shape, over all of its shards."""
    entries, block = math.prod(shape), block_of(shape)
    if moments == "8bit" and block is not None:
        return 2 * (entries + 4 * entries // block)
    return 2 * entries * (2 if moments == "bfloat16" else 4)
