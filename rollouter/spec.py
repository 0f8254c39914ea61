"""What it takes to build a student replica; imports nothing heavy, so that anyone may hold it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid
from async_opd.grading.grader_pool import GraderSpec


@dataclass(frozen=True)
class StudentEngineSpec:
    """One replica. ``kwargs`` come from ``async_opd.models.engine_args``.

    ``top_k`` is how many of its own best tokens it returns at each position, where the objective
    needs them; ``grader`` gives the task reward, where there is one. With a ``seed`` every rollout
    is drawn by one of its own, from this and its uid. ``incarnation`` counts the restarts.
    """

    name: str
    kwargs: dict[str, Any]
    sampling: SamplingSpec
    eos_ids: tuple[int, ...]
    transfer_backend: str  # a key of async_opd.config.registry.TRANSPORTS
    concurrency: int | Literal["auto"] = "auto"
    top_k: int = 0
    grader: GraderSpec | None = None
    seed: int | None = None
    incarnation: int = 0

    @property
    def consumer(self) -> str:
        """What the queue knows it by: another one after each restart, for it has left for good."""
        return f"{self.name}#{self.incarnation}"

    def seed_of(self, uid: Uid) -> int | None:
        """The seed of a rollout: 63 bits of BLAKE2b over the run's seed and the uid."""
        if self.seed is None:
            return None
        digest = blake2b(f"{self.seed}/{uid}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
