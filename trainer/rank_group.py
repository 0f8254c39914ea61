"""The trainer's ranks but the first, as rank 0 sees them: it orders, they do the same as it.

    rank 0 ──dispatch(method, arguments of each)──► rank 1 … N-1
       │ does the same itself                        │
       ▼                                             ▼
    own result ◄──────────── results ────────────────┘

The first rank decides; the others hold shards and compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from async_opd.core.errors import StageError

T = TypeVar("T")

GRACE_S = 10.0
"""A rank that dies breaks the others' collectives, and is found dead a moment later."""


class RankGroup(Protocol):
    """Ranks 1 … N-1."""

    @property
    def ranks(self) -> int:
        """All of them, the first one too."""

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """Has each do something, with arguments of its own; call what is returned for the results.

        From a thread beside the event loop. Calling it raises what the first that failed raised.
        StageError after a failure, or after ``mark_broken``: then they are out of step.
        """
        ...

    def mark_broken(self) -> None:
        """Rank 0 has failed in the middle of what they all do: no more orders."""

    async def failure(self) -> StageError:
        """Returns when one of them has died or failed."""
        ...


class SingleRank:
    """There is one rank."""

    ranks = 1

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """There is nobody."""
        return list

    def mark_broken(self) -> None:
        """There is nobody."""

    async def failure(self) -> StageError:
        """Never."""
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


SINGLE_RANK = SingleRank()


async def run_with_ranks(
    rank_group: RankGroup, work: Coroutine[Any, Any, T], grace_s: float = GRACE_S
) -> T:
    """The result of work that the others take part in, or their failure, which may be its cause.

    Where another rank has failed, the work itself may hang in a collective until its bound.
    """
    if rank_group.ranks == 1:
        return await work
    own, failure = asyncio.ensure_future(work), asyncio.ensure_future(rank_group.failure())
    own.add_done_callback(_retrieve_exception)
    try:
        await asyncio.wait((own, failure), return_when=asyncio.FIRST_COMPLETED)
        if own.done() and own.exception() is not None:
            await asyncio.wait((failure,), timeout=grace_s)
        if failure.done() and not (own.done() and own.exception() is None):
            raise failure.result()
        return own.result()
    finally:
        failure.cancel()
        own.cancel()


def _retrieve_exception(task: asyncio.Future[Any]) -> None:
    """What it raises is known already, or comes too late."""
    if not task.cancelled():
        task.exception()
