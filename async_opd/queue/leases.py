"""What a topic has lent: to whom, under which number, and until when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from async_opd.core.batch import Batch
from async_opd.core.deadline import Cancellable, Timer
from async_opd.core.lease import Lease


@dataclass(frozen=True)
class LeaseEntry:
    """A lease, whose it is, and when it was lent (``time.monotonic``)."""

    lease: Lease
    consumer: str
    since: float
    timer: Cancellable | None

    def cancel(self) -> None:
        """Its time does not run out any more."""
        if self.timer is not None:
            self.timer.cancel()


class LeaseTable:
    """Leases are numbered from the time of birth: no number comes twice, whoever restarts."""

    def __init__(self, lease_s: float, timer: Timer, expired: Callable[[LeaseEntry], None]) -> None:
        """``expired`` is told of one neither lent nor renewed for ``lease_s``; it is still lent."""
        self._lease_s = lease_s
        self._timer = timer
        self._expired = expired
        self._leases: dict[int, LeaseEntry] = {}
        self._samples = 0
        self._first = self._next = time.time_ns()

    def __len__(self) -> int:
        """Samples that are lent."""
        return self._samples

    def grant(self, batches: tuple[Batch, ...], consumer: str) -> Lease:
        """These are the consumer's, for a time."""
        lease = Lease(self._next, batches)
        self._next += 1
        self._leases[lease.id] = LeaseEntry(
            lease, consumer, time.monotonic(), self._started(lease.id)
        )
        self._samples += len(lease)
        return lease

    def renew(self, lease_ids: Iterable[int]) -> None:
        """Their time begins anew; one that is not lent stays so."""
        for lease_id in lease_ids:
            entry = self._leases.get(lease_id)
            if entry is not None:
                entry.cancel()
                self._leases[lease_id] = replace(entry, timer=self._started(lease_id))

    def remove(self, lease_id: int) -> Lease | None:
        """It is lent no longer; None if it was not."""
        entry = self._leases.pop(lease_id, None)
        if entry is None:
            return None
        entry.cancel()
        self._samples -= len(entry.lease)
        return entry.lease

    def predates_restart(self, lease_id: int) -> bool:
        """Whether it was lent by somebody who died before this one was born."""
        return lease_id < self._first

    def of(self, consumer: str) -> list[Lease]:
        """What a consumer has, in the order it got them."""
        return [entry.lease for entry in self._leases.values() if entry.consumer == consumer]

    @property
    def batches(self) -> Iterator[Batch]:
        """All that is lent."""
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
