"""What it takes to build a student replica; imports nothing heavy, so that anyone may hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from async_opd.core.stages import SamplingSpec


@dataclass(frozen=True)
class StudentEngineSpec:
    """One replica. ``kwargs`` come from ``async_opd.core.engine_args``.

    ``top_k`` is how many of its own best tokens it returns at each position, where the objective
    needs them; ``grader`` gives the task reward, where there is one.
    """

    name: str
    kwargs: dict[str, Any]
    sampling: SamplingSpec
    eos_ids: tuple[int, ...]
    transfer_backend: str  # "gloo" or "nccl"
    concurrency: int | Literal["auto"] = "auto"
    top_k: int = 0
    grader: str | None = None
