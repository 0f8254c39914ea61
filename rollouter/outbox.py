"""Puts finished items into the queue, in batches whose size follows the speed of the queue."""

from __future__ import annotations

import asyncio
from itertools import islice

from async_opd.core.batch import Batch
from async_opd.core.errors import StageError
from async_opd.core.samples import Rollout, Sample
from async_opd.core.stages import Queue

Entry = tuple[Rollout | Sample, asyncio.Future[None]]


class Outbox:
    """One sender per topic: the items that finish while it puts a batch are its next batch.

    There is no timer: the sender puts a single item at once, and batches grow with the time that
    the queue takes.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._waiting: dict[str, list[Entry]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}

    async def put(self, topic: str, item: Rollout | Sample) -> None:
        """Returns when the item is in the queue; raises the error of the queue."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, []).append((item, future))
        if topic not in self._senders:
            self._senders[topic] = asyncio.create_task(self._send(topic), name=f"outbox {topic}")
        await future

    def close(self) -> None:
        """Cancels the senders; waiting items never reach the queue."""
        for sender in self._senders.values():
            sender.cancel()
        self._waiting.clear()

    async def _send(self, topic: str) -> None:
        try:
            while self._waiting.get(topic):
                entries, self._waiting[topic] = self._waiting[topic], []
                cause = "the sender ended before it put all items that had finished"
                unsent: Exception = StageError("outbox", cause)
                try:
                    await self._put(topic, entries)
                except Exception as error:  # an item that cannot be packed
                    unsent = error
                finally:  # no ``put`` waits for a sender that does not go on
                    _settle(entries, unsent)
        finally:
            del self._senders[topic]

    async def _put(self, topic: str, entries: list[Entry]) -> None:
        left = iter(entries)
        for batch in Batch.packed(item for item, _ in entries):
            sent = list(islice(left, len(batch)))
            try:
                await self._queue.put(topic, batch)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                # not ``close``: Ray ends a call that it has cancelled so
                cause = "the call that puts finished items into the queue was cancelled"
                _settle(sent, StageError("queue", cause, "see ray_messages.log"))
            except Exception as error:
                _settle(sent, error)
            else:
                _settle(sent, None)


def _settle(entries: list[Entry], error: Exception | None) -> None:
    for _, future in entries:
        if future.done():  # its ``put`` was cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
