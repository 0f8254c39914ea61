"""One bounded stream of batches between two stages, with leases.

    producer ── put (waits for room) ──► [ ready │ leased ] ── get (waits for items) ──► consumer
                                            ▲        │  ack: gone, room is free
                                            │        │  renew: the lease's time begins anew
                                            └────────┘  nack or expiry: back to the front

Plain asyncio in one event loop. Every change of state wakes exactly the waiters that can go on,
oldest first. Nothing polls. ``Leases``
has the consumer, number and expiry of each.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Any

from async_opd.core.batch import MESSAGE_BYTES, Batch
from async_opd.core.errors import QueueClosed
from async_opd.core.samples import Header
from async_opd.core.stages import Lease, TopicStats
from async_opd.core.uid import Uid
from async_opd.waiting.deadline import Cancellable, Timer


@dataclass(frozen=True)
class LeaseEntry:
    """A lease, its consumer, and when it was granted (``time.monotonic``)."""

    lease: Lease
    consumer: str
    since: float
    timer: Cancellable | None

    def cancel(self) -> None:
        """Stops the timer: the lease expires no more."""
        if self.timer is not None:
            self.timer.cancel()


class LeaseTable:
    """Leases by number. A queue that is restarted repeats none: they begin at a random one."""

    def __init__(self, lease_s: float, timer: Timer, expired: Callable[[LeaseEntry], None]) -> None:
        """``expired`` is called with an entry that was not renewed for ``lease_s``."""
        self._lease_s = lease_s
        self._timer = timer
        self._expired = expired
        self._leases: dict[int, LeaseEntry] = {}
        self._samples = 0
        self._first = self._next = randbits(62)  # the clock of a dead process may have been ahead

    def __len__(self) -> int:
        """Samples that are leased."""
        return self._samples

    def grant(self, batches: tuple[Batch, ...], consumer: str) -> Lease:
        """Leases the batches to the consumer; the lease's time begins."""
        lease = Lease(self._next, batches)
        self._next += 1
        self._leases[lease.id] = LeaseEntry(
            lease, consumer, time.monotonic(), self._started(lease.id)
        )
        self._samples += len(lease)
        return lease

    def renew(self, lease_ids: Iterable[int]) -> None:
        """The time of these leases begins anew; numbers without a lease are ignored."""
        for lease_id in lease_ids:
            entry = self._leases.get(lease_id)
            if entry is not None:
                entry.cancel()
                self._leases[lease_id] = replace(entry, timer=self._started(lease_id))

    def get(self, lease_id: int) -> Lease | None:
        """The lease; None if there is none of this number."""
        entry = self._leases.get(lease_id)
        return None if entry is None else entry.lease

    def remove(self, lease_id: int) -> Lease | None:
        """Removes and returns the lease; None if there is none of this number."""
        entry = self._leases.pop(lease_id, None)
        if entry is None:
            return None
        entry.cancel()
        self._samples -= len(entry.lease)
        return entry.lease

    def predates_restart(self, lease_id: int) -> bool:
        """Whether a queue process that has died granted it, before this one started."""
        return not self._first <= lease_id < self._next

    def of(self, consumer: str) -> list[Lease]:
        """The leases of a consumer, in the order in which they were granted."""
        return [entry.lease for entry in self._leases.values() if entry.consumer == consumer]

    def having(self, lost: Collection[int]) -> list[Lease]:
        """The leases with any of these stored payloads, newest first."""
        entries = reversed(self._leases.values())
        return [e.lease for e in entries if any(b.without(lost)[1] for b in e.lease.batches)]

    @property
    def batches(self) -> Iterator[Batch]:
        """All leased batches."""
        return (batch for entry in self._leases.values() for batch in entry.lease.batches)

    def cancel_timers(self) -> None:
        """No lease expires any more."""
        for entry in self._leases.values():
            entry.cancel()

    def _started(self, lease_id: int) -> Cancellable | None:
        if self._lease_s == math.inf:
            return None
        return self._timer(self._lease_s, lambda: self._expire(lease_id))

    def _expire(self, lease_id: int) -> None:
        entry = self._leases.get(lease_id)
        if entry is not None:
            self._expired(entry)


@dataclass
class _Getter:
    at_least: int
    at_most: int
    consumer: str
    share: bool
    tokens: int | None
    payloads: bool
    future: asyncio.Future[Lease]


@dataclass
class _Putter:
    batch: Batch
    future: asyncio.Future[None]


@dataclass
class Topic:
    """One bounded stream of batches.

    ``max_samples`` and ``max_bytes`` bound the ready and the leased samples together; see
    ``_has_room`` for the two exceptions. ``notify`` is called with a message for every lease that
    expired, ``freed`` with samples that leave the topic, or do not come into it. A lease has at
    most ``lease_bytes``, or one sample.
    """

    max_samples: int
    max_bytes: int
    lease_s: float
    timer: Timer
    notify: Callable[[str], None] = lambda text: None
    lease_bytes: int = MESSAGE_BYTES
    freed: Callable[[Batch], None] = lambda batch: None
    _ready: deque[Batch] = field(default_factory=deque)
    _ready_count: int = 0
    _ready_bytes: int = 0
    _nbytes: int = 0
    _getters: deque[_Getter] = field(default_factory=deque)
    _putters: deque[_Putter] = field(default_factory=deque)
    _leases: LeaseTable = field(init=False)
    _closed: bool = False
    _released: set[str] = field(default_factory=set)
    _put: int = 0
    _acked: int = 0
    _returned: int = 0
    _expired: int = 0

    def __post_init__(self) -> None:
        """The table of leases is empty at first."""
        self._leases = LeaseTable(self.lease_s, self.timer, self._expire)

    async def put(self, batch: Batch) -> None:
        """Appends a batch, in the order of the calls; waits for room.

        It may have come in although the call was cancelled.
        """
        self._refuse_if_closed()
        if not len(batch):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._putters.append(_Putter(batch, future))
        self._settle()
        try:
            await future
        except (asyncio.CancelledError, QueueClosed):
            if future.cancelled() or future.exception():
                self.freed(batch)  # else it came in, in the turn in which the caller was cancelled
            self._settle()
            raise

    async def get(
        self,
        at_most: int,
        at_least: int = 1,
        consumer: str = "",
        share: bool = False,
        tokens: int | None = None,
        payloads: bool = True,
    ) -> Lease:
        """Takes up to ``at_most`` samples; waits for ``at_least``, or for ``lease_bytes`` of them.

        So a lease of large samples may have fewer than ``at_least``. With ``share`` the lease has
        at most an even share of the ready samples among all waiting consumers; it has at most
        ``tokens`` tokens, or one sample. Without ``payloads`` the lease has the headers of any
        bytes; the topic keeps the samples for ``fetch``, within its bounds, until ``ack``.
        ValueError if ``at_least`` exceeds ``at_most`` or ``max_samples``: it could wait for ever.
        """
        if not 1 <= at_least <= min(at_most, self.max_samples):
            raise ValueError(
                f"cannot wait for {at_least} samples: at most {at_most} asked for, and the topic "
                f"holds {self.max_samples}"
            )
        self._refuse_if_closed()
        if consumer in self._released:
            raise _released_consumer(consumer)
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._getters.append(_Getter(at_least, at_most, consumer, share, tokens, payloads, future))
        self._settle()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.nack(future.result().id)  # granted in the turn in which it was cancelled
            self._settle()
            raise

    def fetch(self, lease_id: int, uids: Collection[Uid]) -> Batch:
        """The samples of these uids that the lease has; they stay leased."""
        lease = self._leases.get(lease_id)
        batches = () if lease is None else lease.batches
        wanted = frozenset(uids)
        return Batch.join([part for batch in batches for part in batch.only(wanted)])

    def ack(self, lease_id: int) -> bool:
        """Removes the lease's samples. False if it had expired or was settled before.

        True for a lease of a queue process that died before this one started: its samples are gone.
        """
        if self._leases.predates_restart(lease_id):
            return True
        lease = self._leases.remove(lease_id)
        if lease is None:
            return False
        self._nbytes -= sum(batch.nbytes for batch in lease.batches)
        self._acked += len(lease)
        for batch in lease.batches:
            self.freed(batch)
        self._settle()
        return True

    def take_out(self, lost: Collection[int]) -> list[Batch]:
        """Removes samples by the numbers of their stored payloads; leases that have one expire."""
        for lease in self._leases.having(lost):
            self._put_back(lease.id)
        split = [batch.without(lost) for batch in self._ready]
        gone = [part for _, parts in split for part in parts]
        if gone:
            self._ready = deque(part for parts, _ in split for part in parts)
            count, nbytes = sum(map(len, gone)), sum(part.nbytes for part in gone)
            self._ready_count, self._acked = self._ready_count - count, self._acked + count
            self._ready_bytes, self._nbytes = self._ready_bytes - nbytes, self._nbytes - nbytes
            for batch in gone:
                self.freed(batch)
        self._settle()
        return gone

    def put_first(self, batch: Batch) -> None:
        """Puts a batch before all others, whatever the bounds: it was in a topic before."""
        self._ready.appendleft(batch)
        self._count_put(batch)
        self._settle()

    def renew(self, lease_ids: Iterable[int]) -> None:
        """The time of these leases begins anew. A lease that has expired stays expired."""
        self._leases.renew(lease_ids)

    def nack(self, lease_id: int) -> bool:
        """Puts the lease's samples back to the front. False if it was settled before."""
        found = self._put_back(lease_id)
        self._settle()
        return found

    def _put_back(self, lease_id: int) -> bool:
        lease = self._leases.remove(lease_id)
        if lease is None:
            return False
        self._ready.extendleft(reversed(lease.batches))
        self._ready_count += len(lease)
        self._ready_bytes += sum(batch.nbytes for batch in lease.batches)
        self._returned += len(lease)
        return True

    @property
    def headers(self) -> tuple[Header, ...]:
        """The headers of all samples, leased or ready."""
        return tuple(header for batch in self._all for header in batch.headers)

    def contents(self, uids: Collection[Uid]) -> tuple[Batch, ...]:
        """The leased or ready samples of these uids; they stay where they are."""
        return tuple(part for batch in self._all for part in batch.only(uids))

    @property
    def _all(self) -> tuple[Batch, ...]:
        return (*self._leases.batches, *self._ready)

    def release(self, consumer: str) -> int:
        """Puts every lease of the consumer back to the front; its later ``get`` calls fail.

        Returns the number of samples that went back.
        """
        self._released.add(consumer)
        held = self._leases.of(consumer)
        for getter in self._getters:
            if getter.consumer == consumer and not getter.future.done():
                getter.future.set_exception(_released_consumer(consumer))
        for lease in reversed(held):
            self.nack(lease.id)
        self._settle()
        return sum(map(len, held))

    def close(self) -> None:
        """Every waiting and later call raises QueueClosed."""
        self._closed = True
        self._leases.cancel_timers()
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
            leased=len(self._leases),
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
        self._count_put(putter.batch)
        putter.future.set_result(None)
        return True

    def _count_put(self, batch: Batch) -> None:
        self._ready_count += len(batch)
        self._ready_bytes += batch.nbytes
        self._nbytes += batch.nbytes
        self._put += len(batch)

    def _serve_getter(self) -> bool:
        while self._getters and self._getters[0].future.done():
            self._getters.popleft()
        if not self._getters or not self._has_enough(self._getters[0]):
            return False
        getter = self._getters.popleft()
        at_most = getter.at_most
        if getter.share:
            waiting = 1 + sum(not other.future.done() for other in self._getters)
            even = -(-self._ready_count // waiting)  # rounded up
            at_most = min(at_most, max(getter.at_least, even))
        getter.future.set_result(self._grant(at_most, getter))
        return True

    def _has_enough(self, getter: _Getter) -> bool:
        full = getter.payloads and self._ready_bytes >= self.lease_bytes
        return full or self._ready_count >= getter.at_least

    def _has_room(self, batch: Batch) -> bool:
        held = self._ready_count + len(self._leases)
        if held == 0:  # a batch above the bounds would never fit: an empty topic takes any batch
            return True
        # A consumer may wait for more samples than the bounds let in, a training batch for example.
        # Only another put can end its wait, and only its ack makes room: without this exception
        # both would wait for ever.
        if self._getters and not self._has_enough(self._getters[0]):
            return True
        nbytes = self._nbytes + batch.nbytes
        return held + len(batch) <= self.max_samples and nbytes <= self.max_bytes

    def _grant(self, at_most: int, getter: _Getter) -> Lease:
        batches: list[Batch] = []
        count, tokens = at_most, getter.tokens
        room = self.lease_bytes if getter.payloads else self._ready_bytes
        while self._ready and count:
            fits = self._ready[0].first(count, room, tokens)
            if not fits and batches:
                break
            # the first sample is granted even if it alone exceeds the bytes or tokens of a lease
            batch, rest = self._ready.popleft().split(max(fits, 1))
            if len(rest):
                self._ready.appendleft(rest)
            batches.append(batch)
            count, room = count - len(batch), room - batch.nbytes
            tokens = None if tokens is None else tokens - batch.tokens
        self._ready_count -= at_most - count
        self._ready_bytes -= sum(batch.nbytes for batch in batches)
        lease = self._leases.grant(tuple(batches), getter.consumer)
        if getter.payloads:
            return lease
        return replace(lease, batches=tuple(batch.without_payloads for batch in batches))

    def _expire(self, entry: LeaseEntry) -> None:
        self._expired += len(entry.lease)
        self.nack(entry.lease.id)
        self.notify(
            f"{len(entry.lease)} samples went back: {entry.consumer or 'a nameless consumer'} took "
            f"them {time.monotonic() - entry.since:.0f} s ago and did not renew their lease for "
            f"{self.lease_s:g} s. If it still works on them, they are worked on twice, and the "
            f"second copy is dropped: raise queue.lease_s if its event loop may block for so long"
        )


def _released_consumer(consumer: str) -> QueueClosed:
    return QueueClosed(f"{consumer} was released as dead: its leases went to the other consumers")


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(QueueClosed("the topic was closed"))
