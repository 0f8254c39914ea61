"""What a teacher replica is built from. Imports no vLLM, so that every process may import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from async_opd.config.loss import ScoreKind


@dataclass(frozen=True)
class TeacherEngineSpec:
    """One replica. ``kwargs`` come from ``async_opd.models.engine_args``.

    ``kind`` is the kind of scores that it returns; ``top_k`` is 0 for kinds without one.
    ``temperature`` applies to its log-probabilities, not to hidden states. ``beside``: see
    ``async_opd.models.engine_args.fitted``.
    """

    name: str
    kwargs: dict[str, Any]
    kind: ScoreKind
    top_k: int
    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    beside: int | None = None
