"""The trainer's ranks 1 … N-1, to which rank 0 dispatches what it computes itself.

    rank 0 ──dispatch(method, arguments of each)──► rank 1 … N-1
       │ does the same itself                        │
       ▼                                             ▼
    own result ◄──────────── results ────────────────┘

Rank 0 decides what is computed; the other ranks hold shards and compute.

``RankSpec`` has the address and the timeouts by which a rank connects to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from async_opd.core.errors import StageError
from async_opd.core.reports import Interval

T = TypeVar("T")
Results = Callable[[], list[Any]]
"""Waits until every other rank has returned; the result of each, in their order."""
GRACE_S = 10.0
"""Seconds after an error of rank 0 in which the failure of another rank is taken for its cause: a
rank that dies breaks the others' collectives before its own death is known."""


@dataclass(frozen=True)
class RankSpec:
    """One rank among ``ranks``, and rank 0's address; ``listener`` is rank 0's open socket.

    A collective that lasts longer than ``timeout_s`` seconds is an error, and so is a rank that
    connects more than ``start_s`` seconds after another. Connected ranks prove to each other that
    they know the ``secret``.
    """

    rank: int
    ranks: int
    host: str
    port: int
    timeout_s: float
    start_s: float
    secret: bytes = field(repr=False)
    listener: int | None = None


class RankGroup(Protocol):
    """Ranks 1 … N-1."""

    @property
    def ranks(self) -> int:
        """Number of ranks, rank 0 included."""

    def dispatch(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Results:
        """Starts the method in each rank with its own arguments; returns a call for the results.

        Both calls are made from a thread other than the event loop's. The second blocks until every
        rank has returned, and raises the error of the first one that failed. StageError after a
        failure or ``mark_broken``: the ranks are no longer in step.
        """
        ...

    def mark_broken(self) -> None:
        """Refuses every later dispatch: rank 0 failed in a computation that all ranks share."""

    def spans(self) -> tuple[Interval, ...]:
        """When each of the ranks computed what, since the last call."""
        ...

    async def failure(self) -> StageError:
        """Waits until a rank has died or failed; returns its error."""
        ...


class SingleRank:
    """The group of a trainer with one rank: nothing is dispatched."""

    ranks = 1

    def dispatch(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Results:
        """There is no other rank: no results."""
        return list

    def mark_broken(self) -> None:
        """There is no other rank to refuse."""

    def spans(self) -> tuple[Interval, ...]:
        """There is no other rank."""
        return ()

    async def failure(self) -> StageError:
        """Never returns."""
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


SINGLE_RANK = SingleRank()


@contextmanager
def dispatched(
    rank_group: RankGroup, method: str, arguments: Sequence[tuple[Any, ...]]
) -> Iterator[Results]:
    """The other ranks run the method during the block, each with its own arguments.

    An error in the block breaks the group: some ranks may have finished it, others not.
    """
    results = rank_group.dispatch(method, arguments)
    try:
        yield results
    except BaseException:
        rank_group.mark_broken()
        raise


class AllRanks:
    """Rank 0 and the others, which do the same as rank 0."""

    def __init__(self, first: Any, others: RankGroup) -> None:
        """``first`` is rank 0's Rank."""
        self._first, self._others = first, others
        self.number = others.ranks

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Each rank's result of a method of Rank, or of one of its parts such as ``state.load``.

        Followers have it under its last name.
        """
        with self.beside(method, *arguments) as results:
            return [attrgetter(method)(self._first)(*arguments), *results()]

    def beside(self, method: str, *arguments: Any) -> AbstractContextManager[Results]:
        """The other ranks run the method during the block, all with the same arguments."""
        each = [arguments] * (self.number - 1)
        return dispatched(self._others, method.rpartition(".")[2], each)


async def run_with_ranks(rank_group: RankGroup, work: Awaitable[T], grace_s: float = GRACE_S) -> T:
    """The result of rank 0's ``work``; raises another rank's failure where there is one.

    That failure may be the cause of the work's own error, or leave the work hanging in a collective
    until the collective's timeout: so it is raised first, and the work is cancelled.
    """
    if rank_group.ranks == 1:
        return await work
    own, failure = asyncio.ensure_future(work), asyncio.ensure_future(rank_group.failure())
    own.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait((own, failure), return_when=asyncio.FIRST_COMPLETED)
        if own.done() and own.exception() is not None:  # perhaps because another rank died
            await asyncio.wait((failure,), timeout=grace_s)
        if failure.done() and not (own.done() and own.exception() is None):
            raise failure.result()
        return own.result()
    finally:
        failure.cancel()
        own.cancel()


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Marks the error as seen: it is raised already, replaced by another's, or of work given up."""
    if not task.cancelled():
        task.exception()
