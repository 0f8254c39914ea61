"""The leases of a topic: the consumer, number and expiry of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from secrets import randbits

from async_opd.core.batch import Batch
from async_opd.core.lease import Lease
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
