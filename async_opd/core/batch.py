"""What travels through the queue: many samples as one buffer, with headers beside it.

    items ──Batch.pack──► rows + one uint8 buffer ──queue──► Batch.unpack ──► items

A Ray call costs far more per object than per byte, so a batch is one flat buffer, and its headers
are plain tuples. The queue splits and joins batches without looking inside the buffer.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from async_opd.core.samples import NEVER_OLD, Group, Header, Lost, Piece, Rollout, Sample

Item = Group | Rollout | Sample | Lost | Piece
T = TypeVar("T", Group, Rollout, Sample, Lost, Piece)
Row = tuple[str, int, int, int, str]  # the fields of Header, in order


@dataclass(frozen=True)
class Batch:
    """Samples on their way: ``rows[i]`` describes the i-th, whose bytes lie in ``buffer`` in order.

    ``buffer`` is uint8 [sum of the rows' nbytes].
    """

    rows: tuple[Row, ...]
    buffer: NDArray[np.uint8]

    @classmethod
    def pack(cls, items: Iterable[Item]) -> Batch:
        """Encodes items; their arrays are copied once."""
        rows: list[Row] = []
        payloads: list[bytes] = []
        for item in items:
            payload = pickle.dumps(item, protocol=5)
            rows.append(_row(item, len(payload)))
            payloads.append(payload)
        return cls(tuple(rows), np.frombuffer(b"".join(payloads), dtype=np.uint8))

    def unpack(self) -> list[Item]:
        """Decodes the items. They share no memory with the buffer."""
        view: memoryview = self.buffer.data
        items, start = [], 0
        for row in self.rows:
            items.append(pickle.loads(view[start : start + row[2]]))
            start += row[2]
        return items

    @classmethod
    def of_headers(cls, headers: Iterable[Header]) -> Batch:
        """Headers without payload: for who only needs to know which samples."""
        rows = tuple((h.uid, h.tokens, 0, h.oldest_version, h.teacher) for h in headers)
        return cls(rows, np.empty(0, dtype=np.uint8))

    @property
    def headers(self) -> tuple[Header, ...]:
        """The headers, in order."""
        return tuple(Header(*row) for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return self.buffer.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """Several batches as one; copies nothing if there is only one."""
        if len(batches) == 1:
            return batches[0]
        rows = tuple(row for batch in batches for row in batch.rows)
        return Batch(rows, np.concatenate([batch.buffer for batch in batches]))

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first ``count`` items and the rest, as views of the same buffer."""
        cut = sum(row[2] for row in self.rows[:count])
        return (
            Batch(self.rows[:count], self.buffer[:cut]),
            Batch(self.rows[count:], self.buffer[cut:]),
        )


def _row(item: Item, nbytes: int) -> Row:
    if isinstance(item, Group):
        prompt = item.prompt
        return (prompt.uid, len(prompt.token_ids), nbytes, NEVER_OLD, prompt.teacher)
    if isinstance(item, Lost):
        header = item.header
        return (header.uid, header.tokens, nbytes, header.oldest_version, header.teacher)
    if isinstance(item, Piece):
        tokens = len(item.prompt_ids) + len(item.response_ids)
        return (item.uid, tokens, nbytes, NEVER_OLD, item.teacher)
    rollout = item if isinstance(item, Rollout) else item.rollout
    teacher = rollout.prompt.teacher
    return (rollout.uid, rollout.tokens, nbytes, rollout.oldest_version, teacher)


def unpack_groups(batches: Sequence[Batch]) -> list[Group]:
    """The groups of several batches, in order; TypeError if there is anything else."""
    return _unpack(batches, Group)


def unpack_lost(batches: Sequence[Batch]) -> list[Lost]:
    """The dead letters of several batches, in order; TypeError if there is anything else."""
    return _unpack(batches, Lost)


def unpack_rollouts(batches: Sequence[Batch]) -> list[Rollout]:
    """The rollouts of several batches, in order; TypeError if there is anything else."""
    return _unpack(batches, Rollout)


def unpack_pieces(batches: Sequence[Batch]) -> list[Piece]:
    """The pieces of several batches, in order; TypeError if there is anything else."""
    return _unpack(batches, Piece)


def unpack_samples(batches: Sequence[Batch]) -> list[Sample]:
    """The samples of several batches, in order; TypeError if there is anything else."""
    return _unpack(batches, Sample)


def _unpack(batches: Sequence[Batch], kind: type[T]) -> list[T]:
    items = []
    for batch in batches:
        for item in batch.unpack():
            if not isinstance(item, kind):
                raise TypeError(f"expected {kind.__name__} on this topic, found {type(item)}")
            items.append(item)
    return items
