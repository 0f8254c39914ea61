"""Pieces on their way to the queue: nobody waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

from async_opd.core.batch import unpack_pieces
from async_opd.core.queue import MessageQueue
from async_opd.core.samples import Piece
from async_opd.core.stages import early_topic, topics
from rollouter.ahead import Ahead
from rollouter.growing import Growing
from tests.conftest import make_prompt
from tests.rollouter.test_growing import part

TOPIC = early_topic("t")


def queue(most: int = 64) -> MessageQueue:
    return MessageQueue(topics(["t"], ["t"]), most, 1 << 20, 60.0)


def growing(uid: str) -> Growing:
    return Growing(uid, make_prompt(uid.rpartition("/")[0]), 0)


def grow(rollout: Growing, *tokens: int) -> Growing:
    rollout.add(part(list(tokens), 0))
    return rollout


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def taken(messages: MessageQueue, ack: Any = None) -> tuple[int, list[Piece]]:
    lease = await asyncio.wait_for(messages.get(TOPIC, 64, ack=ack), 5)
    return lease.id, unpack_pieces(lease.batches)


async def test_an_offer_goes_to_the_topic_of_its_teacher() -> None:
    messages = queue()
    Ahead(messages).offer(grow(growing("p/0"), 1, 2))
    _, (piece,) = await taken(messages)
    assert (piece.uid, piece.teacher, piece.response_ids.tolist()) == ("p/0", "t", [1, 2])


async def test_offers_that_come_together_travel_together() -> None:
    messages = queue()
    ahead = Ahead(messages)
    for uid in ("p/0", "p/1"):
        ahead.offer(grow(growing(uid), 1))
    _, pieces = await taken(messages)
    assert [piece.uid for piece in pieces] == ["p/0", "p/1"]


async def test_while_the_topic_is_full_a_rollout_grows_and_its_next_piece_is_the_longer() -> None:
    messages, rollout = queue(most=1), growing("p/0")
    ahead = Ahead(messages)
    ahead.offer(grow(rollout, 1))
    await settle()
    ahead.offer(grow(growing("q/0"), 9))  # waits in put
    await settle()
    for token in (2, 3):
        ahead.offer(grow(rollout, token))
        await settle()
    done, (first,) = await taken(messages)
    done, (other,) = await taken(messages, done)
    _, (last,) = await taken(messages, done)
    assert [p.response_ids.tolist() for p in (first, other, last)] == [[1], [9], [2, 3]]


async def test_a_rollout_that_has_ended_sends_no_further_piece() -> None:
    messages, rollout = queue(most=1), growing("p/0")
    ahead = Ahead(messages)
    ahead.offer(grow(growing("q/0"), 1))
    await settle()
    ahead.offer(grow(growing("q/1"), 1))  # waits in put
    await settle()
    ahead.offer(grow(rollout, 1))
    ahead.withdraw(rollout)
    done, _ = await taken(messages)
    await taken(messages, done)
    await settle()
    stats = (await messages.stats())[TOPIC]
    assert (stats.put, stats.waiting_producers) == (2, 0)


async def test_a_queue_that_is_closed_harms_nobody() -> None:
    messages = queue()
    await messages.close()
    ahead = Ahead(messages)
    ahead.offer(grow(growing("p/0"), 1))
    await settle()
    assert ahead._senders == {}


async def test_pieces_that_the_queue_refuses_are_counted_with_its_reason() -> None:
    messages = queue(most=1)
    ahead = Ahead(messages)
    ahead.offer(grow(growing("p/0"), 1))
    await settle()
    for uid in ("q/0", "q/1"):
        ahead.offer(grow(growing(uid), 1))  # they wait in put
    await settle()
    await messages.close()
    await settle()
    assert [ahead.drain(), ahead.drain()] == [{"early_refused/QueueClosed": 2.0}, {}]


async def test_nothing_leaves_after_the_end() -> None:
    messages = queue()
    ahead = Ahead(messages)
    ahead.offer(grow(growing("p/0"), 1))
    ahead.close()
    await settle()
    assert (await messages.stats())[TOPIC].put == 0
