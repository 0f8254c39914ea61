"""The learner's counterpart in the processes of ranks 1 … N-1.

learner ──rank group──► Follower ──its thread──► Rank
                           └──fetch──► queue
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from async_opd.core.stages import Queue
from trainer.batches.micro_batches import Factors, MicroBatch
from trainer.batches.shares import Fetched, Share, fetch
from trainer.rank import BackwardResult, Rank
from trainer.saving.state import RankFile
from trainer.vision.fetching import cache_of
from trainer.work_thread import WorkThread

P = ParamSpec("P")
T = TypeVar("T")


def _in_thread(
    method: Callable[Concatenate[Rank, P], T],
) -> Callable[Concatenate[Follower, P], Awaitable[T]]:
    """The same method of a follower's rank, on its thread, so that the event loop stays free."""

    async def call(follower: Follower, /, *args: P.args, **named: P.kwargs) -> T:
        return await follower.computing.run(method, follower.rank, *args, **named)

    return call


class Follower:
    """The learner's counterpart in the process of another rank, which fetches from ``queue``."""

    def __init__(self, rank: Rank, queue: Queue | None = None) -> None:
        self.rank, self.queue = rank, queue
        self._media = None if queue is None else cache_of(lambda: queue, rank.sight)
        self.computing = WorkThread("train")
        self._taken: list[MicroBatch] = []
        self._fetched: dict[int, tuple[MicroBatch, ...]] = {}  # by the batch's number

    async def take(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Keeps micro-batches for the next ``backward``; one step's may need several messages."""
        self._taken += micro_batches

    async def fetch(self, share: Share) -> Fetched:
        """Fetches the samples of this rank's share, and keeps them for its ``backward``."""
        assert self.queue is not None
        found = await fetch(self.queue, share, self.rank.vocabularies, self._media)
        if not found.lost and not found.unseen:
            self._fetched[share.number] = found.micro_batches
        return replace(found, micro_batches=())

    async def backward(
        self,
        number: int | None = None,
        factors: Factors = None,
        version: int | None = None,
        oldest: int = 0,
    ) -> BackwardResult:
        """Runs Rank.backward on the batch of this number, or on all that was taken."""
        if number is None:
            given, self._taken = self._taken, []
        else:
            given = list(self._fetched[number])
            self._fetched = {key: v for key, v in self._fetched.items() if key > number}
        return await self.computing.run(self.rank.backward, given, factors, version, oldest)

    async def write(self, folder: str) -> RankFile:
        """See Rank.write; steps go on meanwhile."""
        return await asyncio.to_thread(self.rank.write, folder)

    apply = _in_thread(Rank.apply)
    record = _in_thread(Rank.record)
    flush_records = _in_thread(Rank.flush_records)
    keep = _in_thread(Rank.keep)
    platform = _in_thread(Rank.platform)
    weight_digests = _in_thread(Rank.weight_digests)
    kernels = _in_thread(Rank.kernels)
    reference = _in_thread(Rank.reference)
    join_gather = _in_thread(Rank.join_gather)
    capture = _in_thread(Rank.capture)
    load = _in_thread(Rank.load)
    adopt = _in_thread(Rank.adopt)
    free_cache = _in_thread(Rank.free_cache)
    forget_moments = _in_thread(Rank.forget_moments)
    offload = _in_thread(Rank.offload)
    onload = _in_thread(Rank.onload)
