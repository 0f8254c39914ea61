"""What a student replica is built from. Imports no vLLM, so that every process may import it."""

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

    ``top_k`` is the number of its own best tokens that it returns at each position, 0 if the
    objective needs none; ``grader`` gives the task reward, in runs with one. With a ``seed`` every
    rollout has a seed of its own, derived from it and the uid. ``incarnation`` counts the restarts.
    ``beside``: see ``async_opd.models.engine_args.fitted``.
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
    beside: int | None = None

    @property
    def consumer(self) -> str:
        """Its name in the queue, a new one for each incarnation: old leases are released."""
        return f"{self.name}#{self.incarnation}"

    def seed_of(self, uid: Uid) -> int | None:
        """A rollout's seed, if any: 63 bits of BLAKE2b over the run's seed and the uid."""
        if self.seed is None:
            return None
        digest = blake2b(f"{self.seed}/{uid}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
