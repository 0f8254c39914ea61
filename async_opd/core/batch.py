"""Batches for the queue: many samples as one buffer, with headers beside it.

    items ──Batch.pack──► rows + one uint8 buffer ──queue──► Batch.unpack ──► items

A Ray call costs far more per object than per byte, so a batch is one flat buffer, and its headers
are plain tuples. The queue splits and joins batches without decoding the buffer. A message (a
lease, a put, an answer) has at most ``MESSAGE_BYTES``, or one item.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from async_opd.core.samples import (
    NO_VERSION,
    DeadLetter,
    EpisodeFacts,
    FinishReason,
    Group,
    Header,
    Rollout,
    Sample,
)
from async_opd.core.uid import Uid

Item = Group | Rollout | Sample | DeadLetter
T = TypeVar("T", Group, Rollout, Sample, DeadLetter)
Element = TypeVar("Element")
Pairs = tuple[tuple[int, int], ...]
HeaderFields = tuple[
    Uid,
    int,
    int,
    int,
    str,
    int,
    FinishReason,
    float | None,
    str,
    str,
    Pairs,
    EpisodeFacts | None,
    tuple[int, ...],
    Pairs,
]
"""The fields of Header, in order."""

MESSAGE_BYTES = 64 << 20
"""Of one lease, one put or one answer; a larger item travels alone. An event loop that copies so
much is blocked for less than 0.1 s, and the cost of the call is small beside it."""


@dataclass(frozen=True)
class Batch:
    """Encoded samples: ``rows[i]`` describes the i-th; ``buffer`` has their bytes in this order.

    ``buffer`` is uint8 [sum of the rows' nbytes].
    """

    rows: tuple[HeaderFields, ...]
    buffer: NDArray[np.uint8]

    @classmethod
    def pack(cls, items: Iterable[Item]) -> Batch:
        """Encodes items; their arrays are copied once."""
        return cls._of([(item, pickle.dumps(item, protocol=5)) for item in items])

    @classmethod
    def packed(cls, items: Iterable[Item], most: int = MESSAGE_BYTES) -> Iterator[Batch]:
        """Encodes items lazily, in batches of at most ``most`` bytes, or one item."""
        encoded = ((item, pickle.dumps(item, protocol=5)) for item in items)
        return map(cls._of, cut(encoded, lambda entry: len(entry[1]), most))

    @classmethod
    def _of(cls, encoded: Sequence[tuple[Item, bytes]]) -> Batch:
        rows = tuple(_row(item, len(payload)) for item, payload in encoded)
        payloads = b"".join(payload for _, payload in encoded)
        return cls(rows, np.frombuffer(payloads, dtype=np.uint8))

    @classmethod
    def messages(cls, batches: Iterable[Batch], most: int = MESSAGE_BYTES) -> Iterator[list[Batch]]:
        """The items in order, in lists of batches with at most ``most`` bytes. Copies nothing."""
        parts = (part for batch in batches for part in batch._parts(most))
        return cut(parts, lambda part: part.nbytes, most)

    def _parts(self, most: int) -> Iterator[Batch]:
        rest = self
        while len(rest) > 1 and rest.nbytes > most:
            part, rest = rest.split(max(rest.first(len(rest), most), 1))
            yield part
        if len(rest):
            yield rest

    def first(self, count: int, nbytes: int, tokens: int | None = None) -> int:
        """How many of the first ``count`` items have together at most so many bytes and tokens."""
        rows = self.rows[:count]
        fits = len(rows)
        if self.nbytes > nbytes:
            fits = min(fits, sum(size <= nbytes for size in accumulate(row[2] for row in rows)))
        if tokens is not None:
            fits = min(fits, sum(size <= tokens for size in accumulate(row[1] for row in rows)))
        return fits

    def only(self, uids: Collection[Uid]) -> Iterator[Batch]:
        """The items of these uids, as views of the same buffer."""
        start = end = 0
        for wanted, found in groupby(self.rows, lambda row: row[0] in uids):
            rows = tuple(found)
            start, end = end, end + sum(row[2] for row in rows)
            if wanted:
                yield Batch(rows, self.buffer[start:end])

    @property
    def tokens(self) -> int:
        """Tokens of all items."""
        return sum(row[1] for row in self.rows)

    def unpack(self) -> list[Item]:
        """Decodes the items. They share no memory with the buffer.

        ValueError for a batch of headers alone.
        """
        if self.nbytes < sum(row[2] for row in self.rows):
            raise ValueError(f"{len(self)} headers without payloads: Queue.fetch has these")
        view: memoryview = self.buffer.data
        items, start = [], 0
        for row in self.rows:
            items.append(pickle.loads(view[start : start + row[2]]))
            start += row[2]
        return items

    @classmethod
    def of_headers(cls, headers: Iterable[Header]) -> Batch:
        """A batch of headers without payload, as topic ``stale`` has them."""
        rows = tuple(_fields(replace(header, nbytes=0)) for header in headers)
        return cls(rows, np.empty(0, dtype=np.uint8))

    @property
    def without_payloads(self) -> Batch:
        """The same headers with an empty buffer; each keeps the size of its payload."""
        return Batch(self.rows, NOTHING.buffer)

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
        if len(batches) < 2:
            return batches[0] if batches else NOTHING
        rows = tuple(row for batch in batches for row in batch.rows)
        return Batch(rows, np.concatenate([batch.buffer for batch in batches]))

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first ``count`` items and the rest, as views of the same buffer."""
        if count >= len(self):
            return self, NOTHING
        cut = sum(row[2] for row in self.rows[:count])
        return (
            Batch(self.rows[:count], self.buffer[:cut]),
            Batch(self.rows[count:], self.buffer[cut:]),
        )


NOTHING = Batch((), np.empty(0, dtype=np.uint8))


def cut(
    items: Iterable[Element], nbytes: Callable[[Element], int], most: int = MESSAGE_BYTES
) -> Iterator[list[Element]]:
    """Consecutive items in lists of at most ``most`` bytes; a larger item is alone in its list."""
    part: list[Element] = []
    size = 0
    for item in items:
        size += nbytes(item)
        if part and size > most:
            yield part
            part, size = [], nbytes(item)
        part.append(item)
    if part:
        yield part


def _row(item: Item, nbytes: int) -> HeaderFields:
    if isinstance(item, Group):
        prompt = item.prompt
        return _fields(
            Header(prompt.uid, len(prompt.token_ids), nbytes, NO_VERSION, prompt.teacher)
        )
    if isinstance(item, Rollout):
        return _fields(item.header(nbytes))
    return _fields(replace(item.header, nbytes=nbytes))


def _fields(header: Header) -> HeaderFields:
    return cast("HeaderFields", tuple(vars(header).values()))


def unpack(kind: type[T], batches: Sequence[Batch]) -> list[T]:
    """The items of several batches, in order. TypeError if one of them is of another kind."""
    items = []
    for batch in batches:
        for item in batch.unpack():
            if not isinstance(item, kind):
                raise TypeError(f"expected {kind.__name__} on this topic, found {type(item)}")
            items.append(item)
    return items
