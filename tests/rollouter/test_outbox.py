"""The outbox batches by the queue's own pace and passes its errors on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_opd.core.batch import Batch
from async_opd.core.errors import QueueClosed, StageError
from rollouter.rollout_worker import Outbox
from tests.conftest import make_rollout


class GatedQueue:
    """A queue whose puts wait for a gate."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.batches: list[list[str]] = []
        self.error: BaseException | None = None

    async def put(self, topic: str, batch: Batch) -> None:
        await self.gate.wait()
        if self.error:
            raise self.error
        self.batches.append([row[0] for row in batch.rows])


def outbox() -> tuple[Outbox, GatedQueue]:
    queue: Any = GatedQueue()
    return Outbox(queue), queue


async def put_all(box: Outbox, *uids: str) -> list[asyncio.Task[None]]:
    tasks = []
    for uid in uids:
        tasks.append(asyncio.create_task(box.put("t", make_rollout(uid))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


async def test_items_that_gather_while_the_queue_is_busy_leave_as_one_batch() -> None:
    """A put returns only when its item is in the queue."""
    box, queue = outbox()
    tasks = await put_all(box, "a/0", "b/0", "c/0")
    assert not any(task.done() for task in tasks)
    queue.gate.set()
    await asyncio.gather(*tasks)
    assert queue.batches == [["a/0"], ["b/0", "c/0"]]


async def test_an_error_of_the_queue_reaches_every_waiting_put() -> None:
    box, queue = outbox()
    queue.error = QueueClosed("closed")
    tasks = await put_all(box, "a/0", "b/0")
    queue.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [QueueClosed, QueueClosed]


async def test_a_put_after_an_error_is_tried_again() -> None:
    box, queue = outbox()
    queue.gate.set()
    queue.error = QueueClosed("closed")
    with pytest.raises(QueueClosed):
        await box.put("t", make_rollout("a/0"))
    queue.error = None
    await box.put("t", make_rollout("b/0"))
    assert queue.batches == [["b/0"]]


async def test_messages_have_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Batch.packed
    most = 2 * Batch.pack([make_rollout("a/0")]).nbytes
    monkeypatch.setattr(Batch, "packed", lambda items: packed(items, most))
    box, queue = outbox()
    tasks = await put_all(box, "a/0", "b/0", "c/0", "d/0")
    queue.gate.set()
    await asyncio.gather(*tasks)
    assert queue.batches == [["a/0"], ["b/0", "c/0"], ["d/0"]]


async def test_an_error_of_a_message_is_that_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Batch.packed
    monkeypatch.setattr(Batch, "packed", lambda items: packed(items, 1))
    box, queue = outbox()
    tasks = await put_all(box, "a/0", "b/0", "c/0")
    put = queue.put

    async def refuses_b(topic: str, batch: Batch) -> None:
        if batch.headers[0].uid == "b/0":
            raise QueueClosed("closed")
        await put(topic, batch)

    queue.put = refuses_b
    queue.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), QueueClosed, type(None)]


async def test_a_cancelled_call_and_an_item_that_cannot_be_packed_raise_in_the_put() -> None:
    box, queue = outbox()
    queue.error = asyncio.CancelledError()
    queue.gate.set()
    with pytest.raises(StageError, match="was cancelled"):
        await asyncio.wait_for(box.put("t", make_rollout("a/0")), 5)
    item: Any = object()
    with pytest.raises(AttributeError):
        await asyncio.wait_for(box.put("t", item), 5)


async def test_a_put_whose_sender_is_closed_raises() -> None:
    box, _ = outbox()
    (task,) = await put_all(box, "a/0")
    box.close()
    with pytest.raises(StageError, match="the sender ended"):
        async with asyncio.timeout(5):
            await task
