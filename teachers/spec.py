"""What it takes to build a teacher replica; imports nothing heavy, so that anyone may hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TeacherEngineSpec:
    """One replica. ``kwargs`` come from ``async_opd.core.engine_args``.

    ``top_k`` 0 scores the sampled token only.
    """

    name: str
    kwargs: dict[str, Any]
    top_k: int
    eos_ids: tuple[int, ...]
