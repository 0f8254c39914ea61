"""What a topic has lent: to whom, under which number, and until when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from async_opd.core.alarm import Cancellable, Timer
from async_opd.core.batch import Batch
from async_opd.core.lease import Lease


@dataclass(frozen=True)
class Loan:
    """A lease, whose it is, and when it was lent (``time.monotonic``)."""

    lease: Lease
    consumer: str
    since: float
    timer: Cancellable | None

    def cancel(self) -> None:
        """Its time does not run out any more."""
        if self.timer is not None:
            self.timer.cancel()


class Loans:
    """Leases are numbered from the time of birth: no number comes twice, whoever restarts."""

    def __init__(self, lease_s: float, timer: Timer, expired: Callable[[Loan], None]) -> None:
        """``expired`` is told of one neither lent nor renewed for ``lease_s``; it is still lent."""
        self._lease_s = lease_s
        self._timer = timer
        self._expired = expired
        self._loans: dict[int, Loan] = {}
        self._samples = 0
        self._first = self._next = time.time_ns()

    def __len__(self) -> int:
        """Samples that are lent."""
        return self._samples

    def lend(self, batches: tuple[Batch, ...], consumer: str) -> Lease:
        """These are the consumer's, for a time."""
        lease = Lease(self._next, batches)
        self._next += 1
        self._loans[lease.id] = Loan(lease, consumer, time.monotonic(), self._started(lease.id))
        self._samples += len(lease)
        return lease

    def renew(self, lease_ids: Iterable[int]) -> None:
        """Their time begins anew; one that is not lent stays so."""
        for lease_id in lease_ids:
            loan = self._loans.get(lease_id)
            if loan is not None:
                loan.cancel()
                self._loans[lease_id] = replace(loan, timer=self._started(lease_id))

    def take_back(self, lease_id: int) -> Lease | None:
        """It is lent no longer; None if it was not."""
        loan = self._loans.pop(lease_id, None)
        if loan is None:
            return None
        loan.cancel()
        self._samples -= len(loan.lease)
        return loan.lease

    def is_older(self, lease_id: int) -> bool:
        """Whether it was lent by somebody who died before this one was born."""
        return lease_id < self._first

    def of(self, consumer: str) -> list[Lease]:
        """What a consumer has, in the order it got them."""
        return [loan.lease for loan in self._loans.values() if loan.consumer == consumer]

    @property
    def batches(self) -> Iterator[Batch]:
        """All that is lent."""
        return (batch for loan in self._loans.values() for batch in loan.lease.batches)

    def forget_times(self) -> None:
        """No lease expires any more."""
        for loan in self._loans.values():
            loan.cancel()

    def _started(self, lease_id: int) -> Cancellable | None:
        if self._lease_s == math.inf:
            return None
        return self._timer(self._lease_s, lambda: self._expire(lease_id))

    def _expire(self, lease_id: int) -> None:
        loan = self._loans.get(lease_id)
        if loan is not None:
            self._expired(loan)
