"""Leased samples of a topic, and the topic's counts."""

from __future__ import annotations

from dataclasses import dataclass

from async_opd.core.batch import Batch

Ack = int | tuple[int, ...] | None
"""Leases to acknowledge."""


@dataclass(frozen=True)
class Lease:
    """Batches taken from a topic, which go back to it unless renewed or acknowledged in time.

    Of a lease of headers they have no payloads, which the topic keeps (``Queue.fetch``).
    """

    id: int
    batches: tuple[Batch, ...]

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(batch.nbytes for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(batch.tokens for batch in self.batches)


@dataclass(frozen=True)
class TopicStats:
    """A topic now, and its totals since the start (samples; bytes)."""

    ready: int
    leased: int
    nbytes: int
    put: int
    acked: int
    returned: int
    expired: int
    waiting_producers: int
    waiting_consumers: int


@dataclass(frozen=True)
class MediaStats:
    """Images that the queue holds now, and bytes that came in and went out since its start."""

    images: int = 0
    nbytes: int = 0
    added_bytes: int = 0
    fetched_bytes: int = 0
