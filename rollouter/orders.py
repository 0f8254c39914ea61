"""Orders of the rollout stage for replicas, which another process starts and owns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from secrets import randbits
from typing import Generic, TypeVar

from async_opd.core.errors import StageError

Replica = TypeVar("Replica")


@dataclass(frozen=True)
class Order:
    """A request to start the replica of member ``index``.

    Of one process later orders have larger numbers, from a random one on: no other has them.
    """

    number: int
    index: int


class Orders(Generic[Replica]):
    """The orders that the driver has not answered yet."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Order, asyncio.Future[Replica]]] = {}
        self._placed = asyncio.Event()
        self._first = self._next = randbits(62)  # the clock of a dead process may have been ahead

    async def replica(self, index: int) -> Replica:
        """Orders a replica and waits for it. Raises the StageError of its start."""
        order, self._next = Order(self._next, index), self._next + 1
        answer: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._open[order.number] = order, answer
        self._placed.set()
        try:
            return await answer
        finally:
            del self._open[order.number]

    async def after(self, seen: int) -> tuple[Order, ...]:
        """The open orders after the one with the number ``seen``; waits until there is one.

        All of them if another process gave that number.
        """
        while True:
            seen = seen if self._first <= seen < self._next else -1
            if found := tuple(order for order, _ in self._open.values() if order.number > seen):
                return found
            self._placed.clear()
            await self._placed.wait()

    def answer(self, number: int, answer: Replica | StageError) -> None:
        """Answers an order; ignored if its caller was cancelled."""
        _, waiting = self._open.get(number, (None, None))
        if waiting is None or waiting.done():
            return
        if isinstance(answer, StageError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)
