"""Picks the replica for the next piece of work: the one with the fewest outstanding tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Replica = TypeVar("Replica")


class Balancer(Generic[Replica]):
    """Counts what each replica has in flight.

    ``max_in_flight`` pieces of work per replica; more wait here, oldest first. Decisions are
    local: no remote call.
    """

    def __init__(self, replicas: Sequence[Replica], max_in_flight: int) -> None:
        if not replicas:
            raise ValueError("no replica to balance over: 0 replicas can serve 0 requests")
        self._replicas = list(replicas)
        self._tokens = [0] * len(replicas)
        self._in_flight = [0] * len(replicas)
        self._max_in_flight = max_in_flight
        self._room = asyncio.Semaphore(max_in_flight * len(replicas))

    @property
    def outstanding_tokens(self) -> tuple[int, ...]:
        """Tokens in flight on each replica."""
        return tuple(self._tokens)

    @property
    def in_flight(self) -> int:
        """Pieces of work in flight on all replicas."""
        return sum(self._in_flight)

    @asynccontextmanager
    async def acquire(self, tokens: int) -> AsyncIterator[Replica]:
        """Holds a place on a replica for work of about so many tokens; waits while all are full."""
        async with self._room:
            index = min(
                (i for i, busy in enumerate(self._in_flight) if busy < self._max_in_flight),
                key=lambda i: self._tokens[i],
            )
            self._in_flight[index] += 1
            self._tokens[index] += tokens
            try:
                yield self._replicas[index]
            finally:
                self._in_flight[index] -= 1
                self._tokens[index] -= tokens
