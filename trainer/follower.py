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
    method_of: Callable[[Rank], Callable[P, T]],
) -> Callable[Concatenate[Follower, P], Awaitable[T]]:
    """The method of a follower's rank, on its thread, so that the event loop stays free."""

    async def call(follower: Follower, /, *args: P.args, **named: P.kwargs) -> T:
        return await follower.computing.run(method_of(follower.rank), *args, **named)

    return call


class Follower:
    """The learner's counterpart in the process of another rank, which fetches from ``queue``."""

    def __init__(self, rank: Rank, queue: Queue | None = None) -> None:
        self.rank, self.queue = rank, queue
        self._media = None if queue is None else cache_of(lambda: queue, rank.student.sight)
        self.computing = WorkThread("train")
        self._taken: list[MicroBatch] = []
        self._fetched: dict[int, tuple[MicroBatch, ...]] = {}  # by the batch's number

    async def take(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Keeps micro-batches for the next ``backward``; one step's may need several messages."""
        self._taken += micro_batches

    async def fetch(self, share: Share) -> Fetched:
        """Fetches the samples of this rank's share, and keeps them for its ``backward``."""
        assert self.queue is not None
        found = await fetch(self.queue, share, self.rank.student.vocabularies, self._media)
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

    apply = _in_thread(lambda rank: rank.apply)
    record = _in_thread(lambda rank: rank.record)
    flush_records = _in_thread(lambda rank: rank.flush_records)
    keep = _in_thread(lambda rank: rank.keep)
    platform = _in_thread(lambda rank: rank.platform)
    weight_digests = _in_thread(lambda rank: rank.weight_digests)
    kernels = _in_thread(lambda rank: rank.student.kernels)
    reference = _in_thread(lambda rank: rank.student.reference)
    join_gather = _in_thread(lambda rank: rank.weights.join_gather)
    capture = _in_thread(lambda rank: rank.state.capture)
    load = _in_thread(lambda rank: rank.state.load)
    adopt = _in_thread(lambda rank: rank.state.adopt)
    free_cache = _in_thread(lambda rank: rank.free_cache)
    forget_moments = _in_thread(lambda rank: rank.forget_moments)
    offload = _in_thread(lambda rank: rank.offload)
    onload = _in_thread(lambda rank: rank.onload)
