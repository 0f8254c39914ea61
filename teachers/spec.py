"""What it takes to build a teacher replica; imports nothing heavy, so that anyone may hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from async_opd.config.loss import ScoreKind


@dataclass(frozen=True)
class TeacherEngineSpec:
    """One replica. ``kwargs`` come from ``async_opd.models.engine_args``.

    ``kind`` is what it returns for a rollout; ``top_k`` is 0 where it needs none. ``temperature``
    is that of its log-probabilities; hidden states have none.
    """

    name: str
    kwargs: dict[str, Any]
    kind: ScoreKind
    top_k: int
    eos_ids: tuple[int, ...]
    temperature: float = 1.0
