"""Payloads that stay on the node which made them: readers, and the stores of all nodes.

    teacher replica ──payload──► store of its node ◄──read── rank
          └──header, rollout, number──► scorer ──► queue ──► ┘   │ ack: dropped
                                                     ▲           │ lost: expires, scored again
                                                     └───────────┘

The queue claims what is put into it, and drops what is acknowledged: so a payload lives as long as
its sample is in the queue, even if a teacher, the scorer or a rank dies. Rollouts of a lost node's
samples go to their teachers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from async_opd.core.batch import Batch, PayloadStore
from async_opd.core.errors import NotLeased
from async_opd.core.stages import Queue
from async_opd.waiting.deadline import Timer, gather_or_cancel


class PayloadStores(Protocol):
    """The stores of all nodes, in the queue's process: they end with it, and with the queue."""

    async def open(self, node: str) -> PayloadStore:
        """See Queue.payload_store."""
        ...

    def spilled(self) -> dict[str, int]:
        """Bytes that each node's object store wrote to its disk since ``open``, when last asked."""
        ...

    def close(self) -> None:
        """Ends all stores."""


COLLECT_S = 1.0
"""Seconds for which claims and drops are collected, each of which would cost as much as a sample,
and lost samples, for one line of run.log."""


class Claims:
    """Which stored payloads are kept for the queue."""

    def __init__(self, timer: Timer) -> None:
        self._timer, self._waits = timer, False
        self._claimed: dict[PayloadStore, set[int]] = {}
        self._dropped: dict[PayloadStore, set[int]] = {}

    def claim(self, batch: Batch) -> None:
        """Keeps the payloads of the batch, from the next call to their stores on."""
        self._add(self._claimed, batch)

    def drop(self, batch: Batch) -> None:
        """They are kept no more, from the next call on."""
        self._add(self._dropped, batch)

    def _add(self, to: dict[PayloadStore, set[int]], batch: Batch) -> None:
        for store, numbers in batch.numbers.items():
            to.setdefault(store, set()).update(numbers)
        if batch.stored and not self._waits:
            self._waits = True
            self._timer(COLLECT_S, self._send)

    def _send(self) -> None:
        self._waits = False
        claimed, self._claimed = self._claimed, {}
        dropped, self._dropped = self._dropped, {}
        for store in claimed | dropped:
            gone = dropped.get(store, set())
            store.settle(tuple(claimed.get(store, set()) - gone), tuple(gone))


async def read(queue: Queue, topic: str, batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """The samples with their payloads, of which those that are stored are fetched from the nodes.

    NotLeased with the samples whose payloads are lost, after these are to be scored again.
    """
    if not any(batch.stored for batch in batches):
        return tuple(batches)
    places = Batch.join([batch for batch in batches if batch.stored]).numbers
    fetched = await gather_or_cancel(*(store.fetch(them) for store, them in places.items()))
    numbers = (number for them in places.values() for number in them)
    payloads = dict(zip(numbers, (one for part in fetched for one in part), strict=True))
    found, lost = [], {}
    for one in (one for batch in batches for one in batch.each):
        (place,) = one.stored or (None,)
        payload = one.buffer if place is None else payloads[place.number]
        if payload is not None:
            found.append(Batch(one.rows, payload))
        elif place is not None:
            lost[place.number] = one.rows[0][0]
    if lost:
        await queue.score_again(topic, tuple(lost))
        raise NotLeased(topic, tuple(lost.values()))
    return tuple(found)
