"""The data that both ends of a weight transfer share, and their plan of chunks.

sender (trainer)                       receivers (engines of the rollout replicas)
listen, send address and secret  ──►   join the group at rank_offset + own rank
for each chunk of the plan:            for each chunk of the plan:
    pack, broadcast               ──►      receive, unpack, load
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_opd.core.arrays import Float32
from async_opd.core.errors import WeightSyncError
from async_opd.weight_sync.held_rows import HeldRow, Kind

PEFT_PREFIX = "base_model.model."
"""The prefix of adapters' tensors, in PEFT's files and in weight syncs."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a transfer group connect. The sender is rank 0 of ``world_size``.

    ``secret`` authenticates a member: with gloo it is the key of
    ``async_opd.weight_sync.rendezvous``, with NCCL the group's unique id, which also holds host and
    port.
    """

    host: str
    port: int
    world_size: int
    timeout_s: float
    chunk_bytes: int
    secret: bytes = field(repr=False)
    seconds_per_byte: float = 0.0

    def broadcast_s(self, nbytes: int) -> float:
        """Bound of a broadcast of so many bytes, in seconds."""
        return self.timeout_s + nbytes * self.seconds_per_byte


@dataclass(frozen=True)
class Reference:
    """The trainer's log-probabilities of held rows under the weights of a snapshot.

    ``logprobs`` are those of each row's compared tokens, float32, in nats. ``noise`` is their
    mean absolute change in nats if the result of every module has a relative error that is uniform
    within ±1, extrapolated from smaller errors, for each kind of rows; ``rounding`` is
    the largest relative error of one rounding of the dtype in which the trainer computed them;
    ``seconds``: what computing took.
    """

    rows: tuple[HeldRow, ...]
    logprobs: tuple[Float32, ...]
    noise: Mapping[Kind, float]
    rounding: float
    seconds: float = 0.0

    def refuse_not_finite(self) -> None:
        """WeightSyncError unless all numbers are finite."""
        if not all(map(math.isfinite, self.noise.values())) or not all(map(_finite, self.logprobs)):
            cause = "the trainer's own log-probabilities of held rows are not finite"
            raise WeightSyncError("weight sync", cause, "its weights are broken: resume the run")


def _finite(values: Float32) -> bool:
    return bool(np.isfinite(values).all())


@dataclass(frozen=True)
class WeightMeta:
    """Names, dtypes (``bfloat16``) and shapes of the tensors, in the order they are sent.

    ``digests`` are those of the tensors (``async_opd.weight_sync.digests``); ``reference`` is there
    if replicas are compared with the trainer after this sync. ``frozen`` names the student's
    tensors that are never sent: those of a frozen tower or projector.
    """

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    digests: tuple[str, ...] = ()
    reference: Reference | None = None
    frozen: tuple[str, ...] = ()

    @property
    def adapters(self) -> bool:
        """Whether the tensors are adapters of low rank, under PEFT's names, and no weights."""
        return bool(self.names) and all(name.startswith(PEFT_PREFIX) for name in self.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(
            math.prod(shape) * size for shape, size in zip(self.shapes, self.itemsizes, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)


def chunk_plan(sizes: Sequence[int], chunk_bytes: int) -> list[range]:
    """Cuts tensors into consecutive runs of at most ``chunk_bytes`` each.

    A tensor that is larger than that travels alone. Both ends compute the same plan.
    """
    plan: list[range] = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > chunk_bytes:
            plan.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(sizes):
        plan.append(range(start, len(sizes)))
    return plan
