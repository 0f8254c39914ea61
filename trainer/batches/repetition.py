"""The repetition of a response: its share of repeated 8-grams."""

from __future__ import annotations

import numpy as np

from async_opd.accounting.guardrail import GRAM
from async_opd.core.samples import Rollout

WEIGHTS = np.random.default_rng(0).integers(2**63, dtype=np.uint64, size=GRAM) * 2 + 1
"""Odd multipliers of a hash: two different 8-grams collide with a probability of about 2^-60."""


def repetition(rollout: Rollout) -> float:
    """Share of the response's 8-grams that occurred in it before: 0 for none, near 1 for a loop.

    No 8-gram spans tokens that the student did not sample. 0 for fewer than two 8-grams.
    """
    turns = [turn for turn in rollout.turns if len(turn) >= GRAM]
    if not turns:
        return 0.0
    grams = np.concatenate([np.lib.stride_tricks.sliding_window_view(one, GRAM) for one in turns])
    hashes = (grams.astype(np.uint64) * WEIGHTS).sum(axis=1, dtype=np.uint64)  # modulo 2^64
    return 1 - len(np.unique(hashes)) / len(hashes)
