"""A consumer that holds leases of a queue and renews them while its event loop runs.

    queue ──get──► held ──ack──► done
                    │ renew: all held leases, three times in queue.lease_s
                    ▼
                  queue

Only leases that arrived here are renewed: a lease whose answer was lost expires, and its samples go
to the next consumer that asks.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from async_opd.core.reports import LEASE, Interval
from async_opd.core.stages import Ack, Lease, Queue
from async_opd.core.uid import is_traced
from async_opd.waiting.deadline import Deadline, Timer

RENEWALS_SHARE = 1 / 3
"""Share of ``queue.lease_s`` between two renewals: two of them may come late."""


class LeaseHolder:
    """A consumer of a queue. It renews its leases from its first ``get`` until ``close``.

    ``clock`` gives seconds since the epoch.
    """

    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, queue: Queue, consumer: str, timer: Timer | None = None) -> None:
        self._queue = queue
        self._consumer = consumer
        self._deadline = Deadline(f"leases of {consumer}", timer)
        self._held: defaultdict[str, set[int]] = defaultdict(set)
        self._taken: defaultdict[str, list[Interval]] = defaultdict(list)
        self._renewing: asyncio.Task[None] | None = None

    async def get(
        self,
        topic: str,
        at_most: int,
        at_least: int = 1,
        ack: Ack = None,
        tokens: int | None = None,
        payloads: bool = True,
    ) -> Lease:
        """See Queue.get. Raises also the error that ended the renewals."""
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name=f"{self._consumer} renews")
        elif self._renewing.done():
            self._renewing.result()
        self.forget(topic, ack)
        consumer = self._consumer
        lease = await self._queue.get(
            topic, at_most, at_least, ack, consumer, tokens=tokens, payloads=payloads
        )
        self._held[topic].add(lease.id)
        now, uids = self.clock(), (header.uid for part in lease.batches for header in part.headers)
        self._taken[topic] += [Interval(LEASE, now, now, "", u) for u in uids if is_traced(u)]
        return lease

    def taken(self, topic: str) -> tuple[Interval, ...]:
        """When the samples that the trace follows arrived here, since the last call."""
        return tuple(self._taken.pop(topic, ()))

    async def ack(self, topic: str, lease_id: int) -> None:
        """See Queue.ack."""
        self.forget(topic, lease_id)
        await self._queue.ack(topic, lease_id)

    def close(self) -> None:
        """Stops renewing leases until the next ``get``."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    def forget(self, topic: str, ack: Ack) -> None:
        """Renews these leases no longer: they have ended, or are about to."""
        self._held[topic].difference_update((ack,) if isinstance(ack, int) else ack or ())

    async def _renew(self) -> None:
        while True:
            held = {topic: tuple(ids) for topic, ids in self._held.items() if ids}
            lease_s = await self._queue.renew(held)
            await self._deadline.pause(lease_s * RENEWALS_SHARE)
