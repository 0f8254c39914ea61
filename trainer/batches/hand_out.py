"""Assigns batches to the ranks, each of which fetches its own samples from the queue.

    batcher ──headers──► Plan ──Share──► rank 0 … N-1 ──fetch──► queue
                                             │ sums, or leases that are lost
       └──commit, step ◄─────────────────────┘

The next batch is assigned while the step before is computed. Leases that have expired, or whose
queue has died, are released, and another batch is chosen: no sample is lost or trained twice, since
only what is committed is trained and acknowledged. Samples with images that no process has are dead
letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from async_opd.core.samples import Header
from async_opd.media.cache import MediaCache
from async_opd.waiting.deadline import gather_or_cancel
from trainer.batcher import Batcher, TrainBatch
from trainer.batches.packing import Vocabularies
from trainer.batches.shares import Fetched, Plan, Share, fetch
from trainer.rank_group import RankGroup, dispatched, run_with_ranks


class Planner(Protocol):
    """The learner's decisions from headers."""

    @property
    def vocabularies(self) -> Vocabularies:
        """See Rank."""

    def plan(self, headers: Sequence[Header]) -> Plan:
        """Which rank computes what of a batch; called on any thread."""
        ...


@dataclass(frozen=True)
class AssignedBatch:
    """A batch of which every rank has its samples.

    ``own`` is what rank 0 has fetched, ``repetition`` the sum over all responses.
    """

    batch: TrainBatch
    plan: Plan
    number: int
    own: Fetched
    repetition: float


class HandOut:
    """Chooses batches and has the ranks fetch them. Lives on rank 0's event loop."""

    def __init__(
        self,
        batcher: Batcher,
        planner: Planner,
        rank_group: RankGroup,
        media: MediaCache | None = None,
    ) -> None:
        """``media`` is the first rank's cache of images; None: the student reads text only."""
        self._batcher = batcher
        self._media = media
        self._planner = planner
        self._rank_group = rank_group
        self._number = 0
        self._version = 0  # of the last ``take``
        self._next: asyncio.Task[AssignedBatch] | None = None

    async def take(self, version: int) -> AssignedBatch:
        """Waits for a batch that is fresh enough at the trainer's weight ``version``.

        It is taken for a step; the next one is assigned from now on.
        """
        self._version = version
        while True:
            try:
                assigned = await self._assign_next()
            finally:
                self._next = None
            if self._batcher.commit(assigned.batch, version):
                break
        self._assign_next()
        return assigned

    def close(self) -> None:
        """Stops the assignment of the next batch."""
        if self._next is not None:
            self._next.cancel()

    def _assign_next(self) -> asyncio.Task[AssignedBatch]:
        if self._next is None:
            self._next = asyncio.create_task(self._assign(), name="assigning samples")
        return self._next

    async def _assign(self) -> AssignedBatch:
        while True:
            batch = await self._batcher.choose(lambda: self._version)
            plan = await asyncio.to_thread(self._planner.plan, batch.headers)
            self._number += 1
            shares = plan.shares(batch.leases, self._rank_group.ranks, self._number)
            fetched = await run_with_ranks(self._rank_group, self._fetched(shares))
            for error in (one.error for one in fetched if one.error is not None):
                raise error
            lost = {lease for one in fetched for lease in one.lost}
            unseen = {uid: why for one in fetched for uid, why in one.unseen.items()}
            if not lost and not unseen:
                total = sum(one.repetition for one in fetched)
                return AssignedBatch(batch, plan, self._number, fetched[0], total)
            await self._batcher.forget(lost)
            await self._batcher.give_up(unseen)

    async def _fetched(self, shares: Sequence[Share]) -> list[Fetched]:
        """Each rank's fetched part; of the others without their samples."""
        own, *others = shares
        vocabularies = self._planner.vocabularies
        mine: Coroutine[Any, Any, Any] = fetch(self._batcher.queue, own, vocabularies, self._media)
        first, rest = await gather_or_cancel(mine, asyncio.to_thread(self._on_others, others))
        return [first, *rest]

    def _on_others(self, shares: Sequence[Share]) -> list[Any]:
        with dispatched(self._rank_group, "fetch", [(share,) for share in shares]) as results:
            return results()
