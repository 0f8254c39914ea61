"""Makes batches of scored samples; no other place decides which sample is trained.

    topic scored ──lease──► held ──fresh, whole groups──► B samples, by uid ──► step ──► ack
                              │
                              └──older than max_version_lag──► topic stale (headers)

Consumes leases of scored samples, produces batches, waits for scored samples. The samples of the
next batch are fetched and decoded while the step before is computed. With several ranks the leases
are of headers, and each rank fetches its samples (``batches/shares.py``). A duplicate of a sample
(its lease expired, or the group of a dead replica was resampled) is dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from async_opd.core.batch import Batch, cut, unpack
from async_opd.core.bounded import BoundedDict
from async_opd.core.errors import LeaseExpired, NotLeased, StageError
from async_opd.core.reports import Interval
from async_opd.core.samples import DeadLetter, Header, Sample
from async_opd.core.stages import DEAD, SCORED, STALE, TRAINER, Lease, Queue
from async_opd.core.uid import Uid, prompt_uid
from async_opd.queue.lease_holder import LeaseHolder
from async_opd.queue.payloads import read
from async_opd.waiting.deadline import Timer


@dataclass(frozen=True)
class TrainBatch:
    """The samples of one step, sorted by uid; ``requeued`` samples were too old for it.

    Of leased headers there are no samples, but ``leases``, one of each header.
    """

    headers: tuple[Header, ...]
    samples: tuple[Sample, ...]
    requeued: int
    leases: tuple[int, ...] = ()


@dataclass(frozen=True)
class _HeldSample:
    header: Header
    sample: Sample | None  # None for leased headers
    lease: int | None  # None for a sample from a checkpoint


@dataclass(frozen=True)
class _FetchedLease:
    lease: Lease
    samples: Sequence[Sample | None]

    @property
    def held(self) -> list[_HeldSample]:
        headers = [header for batch in self.lease.batches for header in batch.headers]
        return [_HeldSample(*one, self.lease.id) for one in zip(headers, self.samples, strict=True)]


MIN_REMEMBERED = 1 << 16
"""Least number of trained uids whose duplicates are recognized. A duplicate of an older one would
be trained, and the ledger, which does not expect it, would stop the run."""
REMEMBERED_BUDGETS = 4
"""Budgets of samples in flight that can be trained before the duplicate of a sample arrives."""


class Batcher:
    """Takes exactly ``batch_size`` samples for each step, in whole groups of ``group_size``.

    With ``max_version_lag`` a sample whose staleness exceeds it is not trained: its header goes to
    topic ``stale``. ``group_size`` 1 takes samples in the order in which they arrive. Duplicates of
    the last ``remembered`` trained uids are recognized. Without ``payloads`` it leases headers.
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
        payloads: bool = True,
    ) -> None:
        self.duplicates = self.duplicate_tokens = 0
        self.remembered = remembered
        self.queue, self.payloads = queue, payloads
        self._leases = LeaseHolder(queue, TRAINER, timer)
        self._batch_size = batch_size
        self._max_lag = max_version_lag
        self._group_size = group_size
        self._held: dict[Uid, _HeldSample] = {}
        self._taken: list[_HeldSample] = []
        self._open: Counter[int] = Counter()  # lease -> number of its samples not settled
        self._settled: BoundedDict[Uid, None] = BoundedDict(remembered)  # trained uids
        self._dropped: set[Uid] = set()  # uids that will never be trained
        self._next: asyncio.Task[list[_FetchedLease]] | None = None
        self._requeued = 0  # since the last batch was taken
        self._copying: asyncio.Task[tuple[Sample, ...]] | None = None
        self._returning: asyncio.Task[None] | None = None

    async def take(self, version: int) -> TrainBatch:
        """Waits for a batch whose samples are fresh enough at the trainer's weight ``version``."""
        batch = await self.choose(lambda: version)
        self.commit(batch, version)  # nothing ran since it was chosen
        return batch

    async def choose(self, version: Callable[[], int]) -> TrainBatch:
        """Waits for such a batch. Its samples stay held until ``commit``, and may be dropped.

        ``version`` is asked after each wait: weights may be synced meanwhile.
        """
        while True:
            if self._returning is not None and self._returning.done():
                self._returning.result()
            self._requeued += await self._requeue_stale(version())
            chosen = self._choose()
            if chosen:
                break
            await self._receive()
        return TrainBatch(
            tuple(held.header for held in chosen),
            tuple(held.sample for held in chosen if held.sample is not None),
            self._requeued,
            tuple(held.lease for held in chosen if held.lease is not None),
        )

    def commit(self, batch: TrainBatch, version: int) -> bool:
        """Takes a chosen batch for a step. False if a sample was dropped, or is too old now."""
        found = [self._held.get(header.uid) for header in batch.headers]
        chosen = [held for held in found if held and not self._is_stale(held, version)]
        if len(chosen) < len(found):
            return False
        for held in chosen:
            del self._held[held.header.uid]
        self._taken, self._requeued = chosen, 0
        self._fetch_ahead()
        return True

    async def forget(self, leases: Collection[int]) -> None:
        """Lets the samples of leases go that the queue does not have any more.

        Those whose lease expired are in the topic again; those of a queue that died are sampled
        again, as everything in flight is.
        """
        gone = [uid for uid, held in self._held.items() if held.lease in leases]
        await self._settle([self._held.pop(uid) for uid in gone])

    async def give_up(self, reasons: Mapping[Uid, str]) -> None:
        """Makes held samples that cannot be trained dead letters, each with its reason."""
        gone = [self._held.pop(uid) for uid in sorted(reasons) if uid in self._held]
        if gone:
            letters = [DeadLetter(one.header, reasons[one.header.uid], TRAINER) for one in gone]
            await self.queue.put(DEAD, Batch.pack(letters))
            await self._settle(gone)

    async def done(self) -> None:
        """Settles the batch that was taken last: it is trained."""
        self._settled.update((held.header.uid, None) for held in self._taken)
        trained, self._taken = self._taken, []
        await self._settle(trained)

    def copy_held(self) -> asyncio.Task[tuple[Sample, ...]]:
        """Copies the samples that are held or taken for a step: leased headers' from the queue.

        No lease is acknowledged before that. A queue that dies meanwhile has none of them.
        """
        held = (*self._taken, *self._held.values())
        if self._copying is not None:
            self._copying.cancel()  # of a checkpoint that was given up: no lease waits for it
        self._copying = asyncio.create_task(self._copied(held), name="copying held samples")
        return self._copying

    async def _copied(self, held: Iterable[_HeldSample]) -> tuple[Sample, ...]:
        samples = [one.sample for one in held if one.sample is not None]
        with suppress(StageError):
            async for part in self._contents([one.header for one in held if one.sample is None]):
                samples += part
        return tuple(samples)

    async def queued(self, uids: Collection[Uid]) -> AsyncIterator[list[Sample]]:
        """Samples of these uids in topic ``scored``, leased or not, by message; none is removed."""
        found = [header for header in await self.queue.headers(SCORED) if header.uid in uids]
        async for part in self._contents(found):
            yield part

    async def _contents(self, headers: Iterable[Header]) -> AsyncIterator[list[Sample]]:
        for part in cut(headers, lambda header: header.nbytes):
            uids = {header.uid for header in part}
            while True:
                with suppress(NotLeased):  # what is lost is scored again, and is not there any more
                    batches = await self.queue.contents(SCORED, uids)
                    found = await read(self.queue, SCORED, batches)
                    break
            yield await asyncio.to_thread(unpack, Sample, found)

    def hold(self, samples: Sequence[Sample]) -> None:
        """Adds the samples of a checkpoint; they are taken before all others.

        Without ``payloads`` they go back into the queue, from which any rank can fetch them.
        """
        if not self.payloads:
            self._returning = asyncio.create_task(self._return(samples), name="returning samples")
            return
        for sample in samples:
            self._held[sample.rollout.uid] = _HeldSample(sample.header, sample, None)

    async def _return(self, samples: Sequence[Sample]) -> None:
        for batch in Batch.packed(samples):
            await self.queue.put(SCORED, batch)

    async def drop(self, lost: Uid, others: Iterable[Uid] = ()) -> bool:
        """Excludes a lost sample and others of its group from training; returns whether it could.

        False, and no change, if the lost one is held or any of them is taken for a step or trained.
        Otherwise those that are held are acknowledged, and so are those that arrive later. A held
        header is not a copy of the lost one: its payload may have gone with a queue that died.
        """
        gone = {lost, *others}
        taken = gone & {held.header.uid for held in self._taken}
        copy = self.payloads and lost in self._held
        if copy or taken or gone & self._settled.keys():
            return False
        self._dropped |= gone
        await self._settle([self._held.pop(uid) for uid in sorted(gone & self._held.keys())])
        return True

    def arrivals(self) -> tuple[Interval, ...]:
        """See LeaseHolder.taken."""
        return self._leases.taken(SCORED)

    def close(self) -> None:
        """Stops the fetch under way and the renewal of leases."""
        self._leases.close()
        for task in (self._next, self._copying, self._returning):
            if task is not None:
                task.cancel()

    async def _requeue_stale(self, version: int) -> int:
        """Moves headers of samples that are too old to topic ``stale``; returns their number."""
        old = [held for held in self._held.values() if self._is_stale(held, version)]
        if old:
            for held in old:
                del self._held[held.header.uid]
            await self.queue.put(STALE, Batch.of_headers(held.header for held in old))
            await self._settle(old)
        return len(old)

    def _is_stale(self, held: _HeldSample, version: int) -> bool:
        return self._max_lag is not None and held.header.staleness(version) > self._max_lag

    def _choose(self) -> list[_HeldSample]:
        """One batch of the groups that were complete first; empty if there are too few."""
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
        fetching = self._fetch_ahead()
        try:
            if (returning := self._returning) is not None and not returning.done():
                await asyncio.wait((fetching, returning), return_when=asyncio.FIRST_COMPLETED)
                if returning.done():
                    returning.result()  # samples that cannot come back would be waited for
            fetched = await fetching
        finally:
            fetching.cancel()  # if this wait was cancelled, or no sample can come back
            self._next = None
        duplicates, dropped = [], []
        self._open.update({one.lease.id: len(one.lease) for one in fetched})
        taken = {held.header.uid for held in self._taken}
        for held in (held for one in fetched for held in one.held):
            uid = held.header.uid
            if uid in self._dropped:
                dropped.append(held)
            elif uid in self._settled or uid in taken:
                duplicates.append(held)
            elif uid in self._held:
                # Of two headers the newer one is kept: the other's lease may be the one that ended.
                old = self._held[uid] if held.sample is None else held
                duplicates.append(old)
                if old is not held:
                    self._held[uid] = held
            else:
                self._held[uid] = held
        self.duplicates += len(duplicates)
        self.duplicate_tokens += sum(held.header.tokens for held in duplicates)
        await self._settle(duplicates + dropped)

    def _fetch_ahead(self) -> asyncio.Task[list[_FetchedLease]]:
        """The fetch under way; starts one if there is none."""
        if self._next is None:
            self._next = asyncio.create_task(self._fetch(), name="fetching scored samples")
        return self._next

    async def _fetch(self) -> list[_FetchedLease]:
        """Leases as many samples as the next batch lacks; in groups, up to a whole batch of them.

        Large samples come in several leases.
        """
        missing = max(self._batch_size - len(self._held), 1)
        # With groups, samples of other groups than the missing ones may arrive first.
        most = missing if self._group_size == 1 else self._batch_size
        fetched: list[_FetchedLease] = []
        while missing > 0:
            lease = await self._leases.get(SCORED, most, missing, payloads=self.payloads)
            samples: Sequence[Sample | None] = [None] * len(lease)
            if self.payloads:
                try:
                    batches = await read(self.queue, SCORED, lease.batches)
                except NotLeased:  # its samples are in the topic again, without those that are lost
                    self._leases.forget(SCORED, lease.id)
                    continue
                samples = await asyncio.to_thread(unpack, Sample, batches)
            missing, most = missing - len(lease), most - len(lease)
            fetched.append(_FetchedLease(lease, samples))
        return fetched

    async def _settle(self, items: Iterable[_HeldSample]) -> None:
        """Counts the samples off their leases; acknowledges each lease without any left, once."""
        for held in items:
            if held.lease is not None:
                self._open[held.lease] -= 1
        # The leases leave ``_open`` before the first await, in which another call may settle.
        finished = [lease for lease, left in self._open.items() if not left]
        for lease in finished:
            del self._open[lease]
        if finished and (copying := self._copying) is not None:
            await asyncio.wait((copying,))
            if self._copying is copying:
                self._copying = None  # its samples are the checkpoint's alone
        for lease in finished:
            with suppress(LeaseExpired):  # its samples return as duplicates
                await self._leases.ack(SCORED, lease)
