"""Orders of replicas: each is answered once, with a replica or the error of its start."""

from __future__ import annotations

import asyncio

import pytest

from async_opd.core.errors import StageError
from rollouter.orders import Orders
from tests.world.clock import settle


async def ordered(orders: Orders[str], index: int) -> tuple[int, asyncio.Task[str]]:
    """The number of an order for a replica, and the wait for it."""
    waiting = asyncio.create_task(orders.replica(index))
    await settle()
    (*_, order) = await orders.after(-1)
    assert order.index == index
    return order.number, waiting


async def test_an_order_is_answered_with_a_replica() -> None:
    orders = Orders[str]()
    number, waiting = await ordered(orders, 3)
    orders.answer(number, "student/3")
    assert await asyncio.wait_for(waiting, 5) == "student/3"


async def test_an_order_is_answered_with_the_error_of_a_start() -> None:
    orders = Orders[str]()
    number, waiting = await ordered(orders, 4)
    orders.answer(number, StageError("student/4", "no GPU is left"))
    with pytest.raises(StageError, match="no GPU is left"):
        await asyncio.wait_for(waiting, 5)


async def test_later_orders_have_larger_numbers() -> None:
    orders = Orders[str]()
    (one, first), (two, second) = await ordered(orders, 0), await ordered(orders, 1)
    assert [order.index for order in await orders.after(one)] == [1]
    assert two > one
    for number, waiting in ((one, first), (two, second)):
        orders.answer(number, "student")
        await asyncio.wait_for(waiting, 5)


async def test_an_answer_to_a_cancelled_order_is_ignored() -> None:
    orders = Orders[str]()
    number, waiting = await ordered(orders, 0)
    waiting.cancel()
    await asyncio.wait([waiting])
    orders.answer(number, "student/0")
    _, again = await ordered(orders, 0)
    assert not again.done()
    again.cancel()
