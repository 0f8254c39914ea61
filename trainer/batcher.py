"""Where samples become batches: the one place that decides what is trained.

    topic scored ──lease──► held ──fresh, whole groups──► B samples, by uid ──► step ──► ack
                              │
                              └──older than max_version_lag──► topic stale (headers)

Consumes leases of scored samples, produces batches, waits for scored samples. The samples of the
next batch are fetched and decoded while the step before is computed. A sample that comes twice
(its lease expired, or a dead replica's group was sampled again) is dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from async_opd.core.batch import Batch, cut, unpack
from async_opd.core.bounded import BoundedDict
from async_opd.core.deadline import Timer
from async_opd.core.errors import LeaseExpired
from async_opd.core.lease import Lease
from async_opd.core.samples import Header, Sample
from async_opd.core.stages import SCORED, STALE, TRAINER, Queue
from async_opd.core.uid import Uid, prompt_uid
from async_opd.queue.lease_holder import LeaseHolder


@dataclass(frozen=True)
class TrainBatch:
    """The samples of one step, sorted by uid, and how many were too old and went back for it."""

    headers: tuple[Header, ...]
    samples: tuple[Sample, ...]
    requeued: int


@dataclass(frozen=True)
class _HeldSample:
    header: Header
    sample: Sample
    lease: int | None  # none: it came out of a checkpoint


@dataclass(frozen=True)
class _FetchedLease:
    lease: Lease
    samples: list[Sample]

    @property
    def held(self) -> list[_HeldSample]:
        headers = [header for batch in self.lease.batches for header in batch.headers]
        return [_HeldSample(*one, self.lease.id) for one in zip(headers, self.samples, strict=True)]


MIN_REMEMBERED = 1 << 16
"""Trained uids whose copies are recognized, at least. One that comes after so many others stops the
run: the ledger does not expect it."""
REMEMBERED_BUDGETS = 4
"""How often everything that may be in flight can be trained before a copy comes."""


class Batcher:
    """Takes exactly ``batch_size`` samples for each step, of whole groups of ``group_size``.

    With ``max_version_lag`` a sample whose staleness exceeds it is not trained: its header goes to
    topic ``stale``. ``group_size`` 1 takes samples in the order they come. ``remembered`` trained
    uids are known again.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        batch_size: int,
        max_version_lag: int | None = None,
        group_size: int = 1,
        remembered: int = MIN_REMEMBERED,
        timer: Timer | None = None,
    ) -> None:
        self.duplicates = 0
        self.remembered = remembered
        self._queue = queue
        self._leases = LeaseHolder(queue, TRAINER, timer)
        self._batch_size = batch_size
        self._max_lag = max_version_lag
        self._group_size = group_size
        self._held: dict[Uid, _HeldSample] = {}
        self._taken: list[_HeldSample] = []
        self._open: Counter[int] = Counter()  # lease -> its samples that are not settled yet
        self._settled: BoundedDict[Uid, None] = BoundedDict(remembered)  # uids that are trained
        self._dropped: set[Uid] = set()  # uids that will never be
        self._next: asyncio.Task[list[_FetchedLease]] | None = None

    async def take(self, version: int) -> TrainBatch:
        """Waits for a batch that may be trained at the trainer's weight ``version``."""
        requeued = 0
        while True:
            requeued += await self._requeue_stale(version)
            chosen = self._choose()
            if chosen:
                break
            await self._receive()
        for held in chosen:
            del self._held[held.header.uid]
        self._taken = chosen
        self._fetch_ahead()
        return TrainBatch(
            tuple(held.header for held in chosen), tuple(held.sample for held in chosen), requeued
        )

    async def done(self) -> None:
        """The batch taken last is trained."""
        self._settled.update((held.header.uid, None) for held in self._taken)
        trained, self._taken = self._taken, []
        await self._settle(trained)

    @property
    def held(self) -> tuple[Sample, ...]:
        """Samples that are here and not trained, those taken for a step included."""
        return tuple(held.sample for held in (*self._taken, *self._held.values()))

    async def queued(self, uids: Collection[Uid]) -> AsyncIterator[list[Sample]]:
        """What topic ``scored`` has of these, leased or not, message by message; it stays there."""
        found = [header for header in await self._queue.headers(SCORED) if header.uid in uids]
        for part in cut(found, lambda header: header.nbytes):
            batches = await self._queue.contents(SCORED, {header.uid for header in part})
            yield await asyncio.to_thread(unpack, Sample, batches)

    def hold(self, samples: Sequence[Sample]) -> None:
        """Samples that a checkpoint kept; they are taken before any others."""
        for sample in samples:
            self._held[sample.rollout.uid] = _HeldSample(sample.header, sample, None)

    async def drop(self, lost: Uid, others: Iterable[Uid] = ()) -> bool:
        """Whether a lost sample, and others of its group, will never be trained.

        False if a copy of the lost one is held, or any of them taken for a step or trained. Nothing
        changes then. Otherwise those held are let go, and those still to come are not held.
        """
        gone = {lost, *others}
        taken = gone & {held.header.uid for held in self._taken}
        if lost in self._held or taken or gone & self._settled.keys():
            return False
        self._dropped |= gone
        await self._settle([self._held.pop(uid) for uid in sorted(gone & self._held.keys())])
        return True

    def close(self) -> None:
        """Stops fetching ahead; no lease is renewed any more."""
        self._leases.close()
        if self._next is not None:
            self._next.cancel()

    async def _requeue_stale(self, version: int) -> int:
        """Samples that are too old leave; their headers go to topic ``stale``."""
        if self._max_lag is None:
            return 0
        old = [h for h in self._held.values() if h.header.staleness(version) > self._max_lag]
        if old:
            for held in old:
                del self._held[held.header.uid]
            await self._queue.put(STALE, Batch.of_headers(held.header for held in old))
            await self._settle(old)
        return len(old)

    def _choose(self) -> list[_HeldSample]:
        """One batch of whole groups, those that were complete first; empty if there is none."""
        groups: defaultdict[Uid, list[_HeldSample]] = defaultdict(list)
        chosen: list[_HeldSample] = []
        for uid, held in self._held.items():
            group = groups[prompt_uid(uid) if self._group_size > 1 else uid]
            group.append(held)
            if len(group) == self._group_size:
                chosen += group
                if len(chosen) == self._batch_size:
                    return sorted(chosen, key=lambda held: held.header.uid)
        return []

    async def _receive(self) -> None:
        """Waits for more samples and holds them."""
        if self._next is None:
            self._next = asyncio.create_task(self._fetch(), name="fetching scored samples")
        try:
            fetched = await self._next
        finally:
            self._next = None
        again, dropped = [], []
        self._open.update({one.lease.id: len(one.lease) for one in fetched})
        for held in (held for one in fetched for held in one.held):
            uid = held.header.uid
            if uid in self._dropped:
                dropped.append(held)
            elif uid in self._settled or uid in self._held:
                again.append(held)
            else:
                self._held[uid] = held
        self.duplicates += len(again)
        await self._settle(again + dropped)

    def _fetch_ahead(self) -> None:
        if self._next is None:
            self._next = asyncio.create_task(self._fetch(), name="fetching ahead")

    async def _fetch(self) -> list[_FetchedLease]:
        """As many samples as the next batch lacks, or any that may complete its groups.

        In one lease, or of large ones in several.
        """
        missing = max(self._batch_size - len(self._held), 1)
        most = missing if self._group_size == 1 else self._batch_size
        fetched: list[_FetchedLease] = []
        while missing > 0:
            lease = await self._leases.get(SCORED, most, missing)
            missing, most = missing - len(lease), most - len(lease)
            samples = await asyncio.to_thread(unpack, Sample, lease.batches)
            fetched.append(_FetchedLease(lease, samples))
        return fetched

    async def _settle(self, items: Iterable[_HeldSample]) -> None:
        """Acknowledges every lease of which nothing is left, once: others settle meanwhile."""
        for held in items:
            if held.lease is not None:
                self._open[held.lease] -= 1
        finished = [lease for lease, left in self._open.items() if not left]
        for lease in finished:
            del self._open[lease]
        for lease in finished:
            with suppress(LeaseExpired):  # its samples come again, and are recognized
                await self._leases.ack(SCORED, lease)
