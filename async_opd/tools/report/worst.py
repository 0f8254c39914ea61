"""Which recorded samples and tokens are worth looking at, by loss, gap or age.

loss    the distillation loss, plus the reward's surrogate: nats, before weights
gap     log q - log p of the sampled token, either sign: nats
stale   the trainer's weight version minus that of the token
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from async_opd.microscope import CLAMPS, Column, SampleRecord

By = Literal["loss", "gap", "stale"]
LEVELS = 4
"""Shades of each colour."""


def values_of(record: SampleRecord, by: By) -> Column:
    """The value of each token; a gap with its sign."""
    if by == "stale":
        return (record.version - record["version"]).clip(0)
    return record.loss if by == "loss" else record.gap


def worst_token(record: SampleRecord, by: By) -> tuple[float, int]:
    """The largest value of a sample's tokens without its sign, and the token's row.

    One that is not a number is larger than all others. The sample has tokens.
    """
    found = np.nan_to_num(np.abs(values_of(record, by)), nan=math.inf, posinf=math.inf)
    row = int(found.argmax())
    return float(found[row]), row


def worst(records: Iterable[SampleRecord], by: By, count: int) -> list[SampleRecord]:
    """The samples with the worst tokens, the worst first."""
    filled = (one for one in records if len(one))
    return heapq.nlargest(count, filled, key=lambda one: worst_token(one, by)[0])


def levels(record: SampleRecord, by: By) -> list[int]:
    """The shade of each token, -LEVELS to LEVELS: of the 95th percentile of the sample's values."""
    found = values_of(record, by).astype(np.float64)
    sizes = np.abs(found[np.isfinite(found)])
    scale = max(float(np.quantile(sizes, 0.95)) if sizes.size else 0.0, 1e-6)
    shades = np.nan_to_num(found / scale * LEVELS, nan=LEVELS, posinf=LEVELS, neginf=-LEVELS)
    return [int(shade) for shade in np.clip(np.rint(shades), -LEVELS, LEVELS)]


def ranked(record: SampleRecord, by: By, count: int) -> list[int]:
    """The rows of the ``count`` worst tokens, in the order of the response."""
    found = np.nan_to_num(np.abs(values_of(record, by)), nan=math.inf)
    return sorted(np.argsort(-found, kind="stable")[:count].tolist())


@dataclass
class TeacherTokens:
    """Sums over the recorded tokens of one teacher, for their means."""

    samples: int = 0
    tokens: int = 0
    loss: float = 0.0
    gap: float = 0.0
    first: float = 0.0
    oldest: int = 0
    clamps: int = 0

    def add(self, record: SampleRecord) -> None:
        """Adds a sample. Tokens whose loss is not a number count in no sum."""
        self.samples += 1
        self.tokens += len(record)
        self.loss += float(np.nansum(record.loss))
        self.gap += float(np.nansum(record.gap))
        self.first += float(np.nansum(record.gap[:1]))
        self.oldest = max(self.oldest, record.staleness)
        bits = sum(bit for name, bit in CLAMPS.items() if name != "masked")
        self.clamps += int(((record["clamps"] & bits) > 0).sum())


def by_teacher(records: Iterable[SampleRecord]) -> Mapping[str, TeacherTokens]:
    """The recorded tokens of each teacher."""
    found: defaultdict[str, TeacherTokens] = defaultdict(TeacherTokens)
    for record in records:
        found[record.teacher].add(record)
    return dict(sorted(found.items()))


def alternatives(record: SampleRecord, row: int, side: str, count: int) -> Sequence[list[object]]:
    """The most probable tokens at a row: [text, log p (None if unknown), log q], in nats.

    ``side``: ``student``, the student's own; or ``support``, the tokens of the loss's support.
    """
    ids = record.columns.get(f"{side}_ids")
    if ids is None:
        return ()
    theirs = record.columns.get(f"{side}_teacher_logprobs")
    ours = record[f"{side}_logprobs" if side == "student" else f"{side}_student_logprobs"]
    return [
        [record.text(token), None if theirs is None else float(theirs[row, i]), float(ours[row, i])]
        for i, token in enumerate(ids[row, :count])
    ]
