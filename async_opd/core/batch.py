"""Batches for the queue: many samples as one buffer, with headers beside it.

    items ──Batch.pack──► rows + one uint8 buffer ──queue──► Batch.unpack ──► items

A Ray call costs far more per object than per byte, so a batch is one flat buffer, and its headers
are plain tuples. The queue splits and joins batches without decoding the buffer. A message (a
lease, a put, an answer) has at most ``MESSAGE_BYTES``, or one item.

The payload of a large sample may stay on the node that made it (``Stored``): the buffer then has
its rollout, which is scored again if that node is lost.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol, TypeVar, cast

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


class PayloadStore(Protocol):
    """Keeps payloads on a node until they are dropped. It can be sent to other processes."""

    async def put(self, payloads: Sequence[NDArray[np.uint8]]) -> list[int]:
        """Keeps copies. Returns their numbers, which no store gives twice.

        One that is not claimed within ``queue.lease_s`` is dropped: its sample came nowhere.
        """
        ...

    async def fetch(self, numbers: Sequence[int]) -> list[NDArray[np.uint8] | None]:
        """The payloads; None for one that is lost, with its node or its process, or dropped."""
        ...

    def settle(self, claimed: Sequence[int], dropped: Sequence[int]) -> None:
        """Claimed ones are kept until they are dropped. Waits for nothing; ignores lost ones."""


class Stored(NamedTuple):
    """A payload in a store; the batch has a rollout of ``nbytes`` bytes in its place."""

    store: PayloadStore
    number: int
    nbytes: int


@dataclass(frozen=True)
class Batch:
    """Encoded samples: ``rows[i]`` describes the i-th; ``buffer`` has their bytes in this order.

    ``buffer`` is uint8 [sum of the rows' nbytes]. ``stored`` is empty, or has an entry for each
    row: None, or where the row's payload is. Such a row has its rollout in the buffer instead.
    """

    rows: tuple[HeaderFields, ...]
    buffer: NDArray[np.uint8]
    stored: tuple[Stored | None, ...] = ()

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
        return cut(parts, lambda part: part.buffer.nbytes, most)

    def _parts(self, most: int) -> Iterator[Batch]:
        rest = self
        while len(rest) > 1 and rest.buffer.nbytes > most:
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
        return (part for wanted, part in self._runs(lambda i: self.rows[i][0] in uids) if wanted)

    def _runs(self, key: Callable[[int], Element]) -> Iterator[tuple[Element, Batch]]:
        """Consecutive items by the key of their index, as views of the same buffer."""
        start = end = 0
        for found, run in groupby(range(len(self)), key):
            indices = list(run)
            own = slice(indices[0], indices[-1] + 1)
            start, end = end, end + self._held(own)
            yield found, Batch(self.rows[own], self.buffer[start:end], self.stored[own])

    def _held(self, own: slice) -> int:
        """Bytes in the buffer of these items."""
        if not self.stored:
            return sum(row[2] for row in self.rows[own])
        held = zip(self.rows[own], self.stored[own], strict=True)
        return sum(row[2] if one is None else one.nbytes for row, one in held)

    # ── payloads that lie elsewhere ────────────────────────────────────────────────────────────

    @classmethod
    def of_stored(cls, rollouts: Batch, samples: Batch, stored: Sequence[Stored | None]) -> Batch:
        """The samples; of those that are stored, the batch has the rollouts in their place."""
        pairs = zip(rollouts.each, samples.each, stored, strict=True)
        held = [(rollout if one else sample).buffer for rollout, sample, one in pairs]
        return cls(samples.rows, np.concatenate([NOTHING.buffer, *held]), tuple(stored))

    @property
    def each(self) -> Iterator[Batch]:
        """Every item as a batch, a view of the same buffer."""
        return (part for _, part in self._runs(lambda i: i))

    @property
    def numbers(self) -> dict[PayloadStore, list[int]]:
        """The numbers of all stored payloads, by their store."""
        found: dict[PayloadStore, list[int]] = {}
        for one in self.stored:
            if one is not None:
                found.setdefault(one.store, []).append(one.number)
        return found

    def without(self, lost: Collection[int]) -> tuple[list[Batch], list[Batch]]:
        """The items without those of these stored payloads, and those."""
        if not self.stored:
            return [self], []

        def is_lost(index: int) -> bool:
            one = self.stored[index]
            return one is not None and one.number in lost

        runs = list(self._runs(is_lost))
        return [part for gone, part in runs if not gone], [part for gone, part in runs if gone]

    def rollouts(self) -> Iterator[tuple[str, Batch]]:
        """The rollouts in place of the samples, which are all stored, by their teachers."""
        for teacher, part in self._runs(lambda i: self.rows[i][4]):
            sizes = [one.nbytes for one in part.stored if one is not None]
            rows = zip(part.headers, sizes, strict=True)
            of = tuple(_fields(replace(row, nbytes=size, scores="")) for row, size in rows)
            yield teacher, Batch(of, part.buffer)

    @property
    def tokens(self) -> int:
        """Tokens of all items."""
        return sum(row[1] for row in self.rows)

    def unpack(self) -> list[Item]:
        """Decodes the items. They share no memory with the buffer.

        ValueError for a batch of headers alone, and for payloads that are stored elsewhere.
        """
        if any(self.stored):
            raise ValueError(f"{len(self)} samples with stored payloads: read them first")
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
        """Bytes of all payloads, and of rollouts that stand for stored ones."""
        if not self.stored:
            return self.buffer.nbytes
        there = zip(self.rows, self.stored, strict=True)
        return self.buffer.nbytes + sum(row[2] for row, one in there if one is not None)

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """Several batches as one; copies nothing if there is only one."""
        if len(batches) < 2:
            return batches[0] if batches else NOTHING
        rows = tuple(row for batch in batches for row in batch.rows)
        stored: tuple[Stored | None, ...] = ()
        if any(batch.stored for batch in batches):
            places = (batch.stored or (None,) * len(batch) for batch in batches)
            stored = tuple(one for of in places for one in of)
        return Batch(rows, np.concatenate([batch.buffer for batch in batches]), stored)

    def split(self, count: int) -> tuple[Batch, Batch]:
        """The first ``count`` items and the rest, as views of the same buffer."""
        if count >= len(self):
            return self, NOTHING
        cut = self._held(slice(count))
        return (
            Batch(self.rows[:count], self.buffer[:cut], self.stored[:count]),
            Batch(self.rows[count:], self.buffer[cut:], self.stored[count:]),
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
