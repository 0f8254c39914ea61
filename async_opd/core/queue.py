"""The message queue between the stages: bounded topics with leases.

    producer ── put (waits for room) ──► [ ready │ leased ] ── get (waits for items) ──► consumer
                                            ▲        │  ack: gone, room is free
                                            └────────┘  nack or expiry: back to the front

Plain asyncio in one event loop; ``async_opd.cluster.queue`` puts it into a Ray actor. Every change
of state wakes exactly the waiters that can go on, oldest first. Nothing polls.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_opd.core.batch import Batch
from async_opd.core.errors import LeaseExpired, QueueClosed


class Cancellable(Protocol):
    """What a timer returns."""

    def cancel(self) -> None: ...


Ack = int | tuple[int, ...] | None
"""Leases to acknowledge."""

Timer = Callable[[float, Callable[[], None]], Cancellable]


@dataclass(frozen=True)
class Lease:
    """Batches taken from a topic. They come back unless acknowledged in time."""

    id: int
    batches: tuple[Batch, ...]

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)


@dataclass(frozen=True)
class TopicStats:
    """A topic now, and its totals since the start (samples; bytes)."""

    ready: int
    leased: int
    nbytes: int
    put: int
    acked: int
    returned: int
    expired: int
    waiting_producers: int
    waiting_consumers: int


@dataclass
class _Getter:
    at_least: int
    at_most: int
    consumer: str
    share: bool
    future: asyncio.Future[Lease]


@dataclass
class _Putter:
    batch: Batch
    future: asyncio.Future[None]


@dataclass
class _Loan:
    batches: tuple[Batch, ...]
    consumer: str
    timer: Cancellable | None

    def cancel(self) -> None:
        """Its time does not run out any more."""
        if self.timer is not None:
            self.timer.cancel()


@dataclass
class Topic:
    """One bounded stream of batches.

    ``max_samples`` and ``max_bytes`` count what is ready and what is leased out. Two exceptions
    keep it alive: an empty topic takes any batch, and a consumer that waits for more items than
    are ready makes room for the next batch, or a byte bound below one training batch would stop
    the pipeline for ever.
    """

    max_samples: int
    max_bytes: int
    lease_s: float
    timer: Timer
    _ready: deque[Batch] = field(default_factory=deque)
    _ready_count: int = 0
    _loans: dict[int, _Loan] = field(default_factory=dict)
    _leased_count: int = 0
    _nbytes: int = 0
    _getters: deque[_Getter] = field(default_factory=deque)
    _putters: deque[_Putter] = field(default_factory=deque)
    _first_lease: int = field(default_factory=time.time_ns)
    _next_lease: int = field(init=False)
    _closed: bool = False
    _released: set[str] = field(default_factory=set)
    _put: int = 0
    _acked: int = 0
    _returned: int = 0
    _expired: int = 0

    def __post_init__(self) -> None:
        """Leases are numbered from the time of birth: no number comes twice, whoever restarts."""
        self._next_lease = self._first_lease

    async def put(self, batch: Batch) -> None:
        """Appends a batch, in the order of the calls; waits while there is no room."""
        self._refuse_if_closed()
        if not len(batch):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._putters.append(_Putter(batch, future))
        self._settle()
        try:
            await future
        except asyncio.CancelledError:
            self._settle()
            raise

    async def get(
        self, at_most: int, at_least: int = 1, consumer: str = "", share: bool = False
    ) -> Lease:
        """Takes ``at_least`` to ``at_most`` samples; waits until so many are ready.

        ``share`` takes no more than an even share of what is ready among all who wait.
        ValueError if ``at_least`` exceeds ``at_most`` or ``max_samples``: it could wait for ever.
        """
        if not 1 <= at_least <= min(at_most, self.max_samples):
            raise ValueError(
                f"cannot wait for {at_least} samples: at most {at_most} asked for, and the topic "
                f"holds {self.max_samples}"
            )
        self._refuse_if_closed()
        if consumer in self._released:
            raise _taken_for_dead(consumer)
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._getters.append(_Getter(at_least, at_most, consumer, share, future))
        self._settle()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.nack(future.result().id)
            self._settle()
            raise

    def ack(self, lease_id: int) -> bool:
        """The lease's samples are done with. False if it had expired or was given back before.

        One of a queue that died before this one was born is nobody's: True.
        """
        if lease_id < self._first_lease:
            return True
        loan = self._take_back(lease_id)
        if loan is None:
            return False
        self._nbytes -= sum(batch.nbytes for batch in loan.batches)
        self._acked += sum(len(batch) for batch in loan.batches)
        self._settle()
        return True

    def nack(self, lease_id: int) -> bool:
        """The lease's samples go back to the front. False if it was settled before."""
        loan = self._take_back(lease_id)
        if loan is None:
            return False
        self._ready.extendleft(reversed(loan.batches))
        count = sum(len(batch) for batch in loan.batches)
        self._ready_count += count
        self._returned += count
        self._settle()
        return True

    def contents(self) -> tuple[Batch, ...]:
        """What is leased out and what is ready; it all stays where it is."""
        leased = (batch for loan in self._loans.values() for batch in loan.batches)
        return (*leased, *self._ready)

    def release(self, consumer: str) -> int:
        """Every lease of the consumer goes back to the front; it gets nothing from now on.

        Returns the number of samples that went back.
        """
        self._released.add(consumer)
        held = [lease for lease, loan in self._loans.items() if loan.consumer == consumer]
        count = sum(len(batch) for lease in held for batch in self._loans[lease].batches)
        for getter in self._getters:
            if getter.consumer == consumer and not getter.future.done():
                getter.future.set_exception(_taken_for_dead(consumer))
        for lease in reversed(held):
            self.nack(lease)
        self._settle()
        return count

    def close(self) -> None:
        """Every waiting and later call raises QueueClosed."""
        self._closed = True
        for loan in self._loans.values():
            loan.cancel()
        for getter in self._getters:
            _fail(getter.future)
        for putter in self._putters:
            _fail(putter.future)
        self._getters.clear()
        self._putters.clear()

    @property
    def stats(self) -> TopicStats:
        """Counts of the topic."""
        return TopicStats(
            ready=self._ready_count,
            leased=self._leased_count,
            nbytes=self._nbytes,
            put=self._put,
            acked=self._acked,
            returned=self._returned,
            expired=self._expired,
            waiting_producers=sum(not putter.future.done() for putter in self._putters),
            waiting_consumers=sum(not getter.future.done() for getter in self._getters),
        )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise QueueClosed("the topic was closed")

    def _settle(self) -> None:
        """Serves waiters, oldest first, until none can go on."""
        progress = True
        while progress:
            progress = self._serve_putter() or self._serve_getter()

    def _serve_putter(self) -> bool:
        while self._putters and self._putters[0].future.done():
            self._putters.popleft()
        if not self._putters or not self._has_room(self._putters[0].batch):
            return False
        putter = self._putters.popleft()
        self._ready.append(putter.batch)
        self._ready_count += len(putter.batch)
        self._nbytes += putter.batch.nbytes
        self._put += len(putter.batch)
        putter.future.set_result(None)
        return True

    def _serve_getter(self) -> bool:
        while self._getters and self._getters[0].future.done():
            self._getters.popleft()
        if not self._getters or self._ready_count < self._getters[0].at_least:
            return False
        getter = self._getters.popleft()
        at_most = getter.at_most
        if getter.share:
            waiting = 1 + sum(not other.future.done() for other in self._getters)
            at_most = min(at_most, max(getter.at_least, -(-self._ready_count // waiting)))
        getter.future.set_result(self._lend(at_most, getter.consumer))
        return True

    def _has_room(self, batch: Batch) -> bool:
        held = self._ready_count + self._leased_count
        if held == 0:
            return True
        starving = bool(self._getters) and self._ready_count < self._getters[0].at_least
        fits = (
            held + len(batch) <= self.max_samples and self._nbytes + batch.nbytes <= self.max_bytes
        )
        return fits or starving

    def _lend(self, at_most: int, consumer: str) -> Lease:
        batches: list[Batch] = []
        missing = at_most
        while self._ready and missing:
            batch = self._ready.popleft()
            if len(batch) > missing:
                batch, rest = batch.split(missing)
                self._ready.appendleft(rest)
            batches.append(batch)
            missing -= len(batch)
        lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        timer = None
        if self.lease_s != math.inf:
            timer = self.timer(self.lease_s, lambda: self._expire(lease_id))
        self._loans[lease_id] = _Loan(tuple(batches), consumer, timer)
        self._ready_count -= at_most - missing
        self._leased_count += at_most - missing
        return Lease(lease_id, tuple(batches))

    def _take_back(self, lease_id: int) -> _Loan | None:
        loan = self._loans.pop(lease_id, None)
        if loan is not None:
            loan.cancel()
            self._leased_count -= sum(len(batch) for batch in loan.batches)
        return loan

    def _expire(self, lease_id: int) -> None:
        loan = self._loans.get(lease_id)
        if loan is not None:
            self._expired += sum(len(batch) for batch in loan.batches)
            self.nack(lease_id)


def _taken_for_dead(consumer: str) -> QueueClosed:
    return QueueClosed(f"{consumer} was taken for dead: its leases went to the others")


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(QueueClosed("the topic was closed"))


class MessageQueue:
    """All topics of a run. Implements ``async_opd.core.stages.Queue`` in one process."""

    def __init__(
        self,
        topics: tuple[str, ...],
        max_samples: int,
        max_bytes: int,
        lease_s: float,
        timer: Timer | None = None,
        kept: tuple[str, ...] = (),
    ) -> None:
        """Leases of topics in ``kept`` do not expire: they end by ``ack`` or ``release``."""
        timer = timer or (lambda delay, call: asyncio.get_running_loop().call_later(delay, call))
        self._topics = {
            name: Topic(max_samples, max_bytes, math.inf if name in kept else lease_s, timer)
            for name in topics
        }

    async def put(self, topic: str, batch: Batch) -> None:
        """See Topic.put."""
        await self._topics[topic].put(batch)

    async def get(
        self,
        topic: str,
        at_most: int,
        at_least: int = 1,
        ack: Ack = None,
        consumer: str = "",
        share: bool = False,
    ) -> Lease:
        """Acknowledges leases of the same topic first, in the same call; see Topic.get."""
        for lease_id in (ack,) if isinstance(ack, int) else ack or ():
            await self.ack(topic, lease_id)
        return await self._topics[topic].get(at_most, at_least, consumer, share)

    async def ack(self, topic: str, lease_id: int) -> None:
        """See Topic.ack. Raises LeaseExpired."""
        if not self._topics[topic].ack(lease_id):
            raise LeaseExpired(topic, lease_id)

    async def nack(self, topic: str, lease_id: int) -> bool:
        """See Topic.nack."""
        return self._topics[topic].nack(lease_id)

    async def contents(self, topic: str) -> tuple[Batch, ...]:
        """See Topic.contents."""
        return self._topics[topic].contents()

    async def release(self, topic: str, consumer: str) -> int:
        """See Topic.release."""
        return self._topics[topic].release(consumer)

    async def stats(self) -> dict[str, TopicStats]:
        """Counts of every topic."""
        return {name: topic.stats for name, topic in self._topics.items()}

    async def close(self) -> None:
        """Closes every topic."""
        for topic in self._topics.values():
            topic.close()
