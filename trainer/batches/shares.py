"""Each rank's share of a batch, decided from headers, and how it gets its samples.

    headers ──► Plan ──► Share of each rank ──fetch──► its own MicroBatches
                              topic scored ──payloads──┘

No rank needs the samples of another: what the whole batch decides (weights of tokens, assignment,
denominators) depends on headers, and what depends on tokens are sums that each rank returns.
Of samples that rank 0 has already, ``hand_over`` sends each rank its micro-batches.

``HandOut`` assigns batches to the ranks:

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
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from async_opd.core.batch import cut, unpack
from async_opd.core.errors import AsyncOPDError, NotLeased
from async_opd.core.samples import Header, Sample
from async_opd.core.stages import SCORED, Queue
from async_opd.core.uid import Uid
from async_opd.media.cache import MediaCache
from async_opd.queue.payloads import read
from async_opd.waiting.deadline import gather_or_cancel
from trainer.batcher import Batcher, TrainBatch
from trainer.batches.batch_metrics import repetition
from trainer.batches.micro_batches import MicroBatch, PlannedMicroBatch
from trainer.batches.packing import Vocabularies, refuse_foreign_tokens
from trainer.rank_group import RankGroup, dispatched, run_with_ranks
from trainer.vision.fetching import shown_by
from trainer.vision.images import Images, Samples

if TYPE_CHECKING:
    from trainer.rank import Rank


@dataclass(frozen=True)
class Plan:
    """A batch, and the micro-batches of each group of ranks that share rows.

    ``counted`` are the indices of samples with a weight; ``rewards`` are metrics of the rewards.
    ``factors`` by uid multiply the micro-batches' distillation weights (``balance.py``); tokens of
    versions before ``oldest`` have none. Both are known when the batch is taken for a step.
    """

    headers: tuple[Header, ...]
    micro_batches: tuple[tuple[PlannedMicroBatch, ...], ...]
    counted: tuple[int, ...]
    rewards: dict[str, float] = field(default_factory=dict)
    factors: dict[Uid, float] = field(default_factory=dict)
    oldest: int = 0

    @property
    def computed(self) -> list[Header]:
        """The headers of all that is computed and counts, in the order of micro-batches."""
        every = (one for own in self.micro_batches for one in own if one.counts)
        return [self.headers[index] for one in every for index in one.indices]

    def flops(self, rank: Rank) -> float | None:
        """Model FLOPs of the batch; no loss depends on a sample without a response.

        None if this model's cannot be counted.
        """
        if rank.size.unknown:
            return None
        computed = [header for header in self.computed if header.response_tokens]
        return sum(rank.size.of_sample(one, rank.image_tokens(one)) for one in computed)

    def shares(self, leases: Sequence[int], ranks: int, number: int) -> list[Share]:
        """The share of each rank; ``leases`` are those of the headers.

        Every response is measured by one rank: the first that computes it, or, of those that no
        rank computes because they weigh nothing, one after the other in turn.
        """
        sharing = ranks // len(self.micro_batches)
        own = [self.micro_batches[rank // sharing] for rank in range(ranks)]
        measured: list[list[int]] = [[] for _ in range(ranks)]
        for rank in range(0, ranks, sharing):
            measured[rank] += [i for one in own[rank] if one.counts for i in one.indices]
        there = {index for indices in measured for index in indices}
        left = [i for i, h in enumerate(self.headers) if h.response_tokens and i not in there]
        for turn, index in enumerate(left):
            measured[turn % ranks].append(index)
        return [
            Share(
                number,
                tuple(
                    Leased(index, self.headers[index], leases[index])
                    for index in sorted({*seen, *(i for one in planned for i in one.indices)})
                ),
                planned,
                tuple(seen),
            )
            for planned, seen in zip(own, measured, strict=True)
        ]


@dataclass(frozen=True)
class Leased:
    """A header by its index in the batch, and its lease."""

    index: int
    header: Header
    lease: int


@dataclass(frozen=True)
class Share:
    """One rank's part of a batch, to fetch and compute; later batches have higher ``number``s.

    ``measured`` are the indices of the responses whose repetition it measures.
    """

    number: int
    leased: tuple[Leased, ...]
    micro_batches: tuple[PlannedMicroBatch, ...]
    measured: tuple[int, ...]


@dataclass(frozen=True)
class Fetched:
    """A rank's fetched part: its micro-batches, and the sum of its responses' repetition.

    There are none if ``lost`` leases do not have their samples any more, if no process has an image
    of a sample (``unseen``: reasons by uid), or with an ``error``.
    """

    micro_batches: tuple[MicroBatch, ...] = ()
    repetition: float = 0.0
    lost: frozenset[int] = frozenset()
    unseen: Mapping[Uid, str] = field(default_factory=dict)
    error: AsyncOPDError | None = None


async def fetch(
    queue: Queue, share: Share, vocabularies: Vocabularies, media: MediaCache | None = None
) -> Fetched:
    """A rank's samples, from the queue, a message at a time; decoded beside the event loop.

    Their images are those of ``media``, which fetches by hash what it does not have.

    An error is returned, such as that of a token that the student or a teacher's head has no row
    for: an error that a rank raises ends the step under way, which does not need these samples.
    """
    try:
        return await _fetch(queue, share, vocabularies, media)
    except AsyncOPDError as error:
        return Fetched(error=error)


async def _fetch(
    queue: Queue, share: Share, vocabularies: Vocabularies, media: MediaCache | None
) -> Fetched:
    samples: dict[int, Sample] = {}
    lost: set[int] = set()
    for part in cut(share.leased, lambda one: one.header.nbytes):
        leased: defaultdict[int, list[Uid]] = defaultdict(list)
        for one in part:
            leased[one.lease].append(one.header.uid)
        try:
            batches = await read(queue, SCORED, [await queue.fetch(SCORED, leased)])
        except NotLeased as error:
            lost |= {one.lease for one in part if one.header.uid in error.uids}
            continue
        found = {s.rollout.uid: s for s in await asyncio.to_thread(unpack, Sample, batches)}
        samples |= {one.index: found[one.header.uid] for one in part}
    if lost:
        return Fetched(lost=frozenset(lost))
    refuse_foreign_tokens(list(samples.values()), vocabularies)
    encoded, unseen = await shown_by(samples.values(), media)
    if unseen:
        return Fetched(unseen=unseen)
    return Fetched(
        tuple(one.of(samples, encoded) for one in share.micro_batches),
        sum(repetition(samples[index].rollout) for index in share.measured),
    )


def hand_over(plan: Plan, samples: Samples, images: Images, group: RankGroup) -> list[MicroBatch]:
    """Rank 0's micro-batches of samples that it has; the others receive theirs in messages."""
    made = [[one.of(samples, images) for one in own] for own in plan.micro_batches]
    sharing = group.ranks // len(made)
    others = [
        list(cut(made[rank // sharing], lambda micro_batch: micro_batch.nbytes))
        for rank in range(1, group.ranks)
    ]
    for messages in zip_longest(*others, fillvalue=()):
        given = [(tuple(message),) for message in messages]
        with dispatched(group, "take", given) as taken:
            taken()
    return made[0]


class Planner(Protocol):
    """The learner's decisions from headers."""

    @property
    def vocabularies(self) -> Vocabularies:
        """See PlacedStudent."""

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
