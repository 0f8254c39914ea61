"""The trainer's other ranks over Ray: each in an actor of its own.

learner's thread ──dispatch──► event loop ──remote calls──► Follower in rank 1 … N-1
      ▲ results ◄──────────────┘ the first failure ──► failure()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from async_opd.cluster.actor_shell import Remote
from async_opd.cluster.proxies import NO_TIMEOUT
from async_opd.core.errors import ProcessDied, StageError
from async_opd.core.reports import Interval
from async_opd.core.stages import TRAINER
from trainer.rank_group import GRACE_S


class RemoteRankGroup:
    """Implements ``trainer.rank_group.RankGroup``. Lives in rank 0's process, on its event loop."""

    def __init__(self, followers: Sequence[Remote], grace_s: float = GRACE_S / 2) -> None:
        """A rank's error may follow another's death, which is reported up to ``grace_s`` later."""
        self.ranks = len(followers) + 1
        self._followers = tuple(followers)
        self._broken = False
        self._loop = asyncio.get_running_loop()
        self._grace_s = grace_s
        self._spans: list[Interval] = []
        self._failure: asyncio.Future[StageError] = self._loop.create_future()
        self._death: asyncio.Future[StageError] = self._loop.create_future()

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """See RankGroup.dispatch. ``timeouts.collective_s`` bounds the collectives of each call."""
        if self._broken:
            raise StageError(TRAINER, "an error in one of its ranks has put them out of step")
        calls: list[Future[Any]] = [
            asyncio.run_coroutine_threadsafe(self._call(follower, method, given), self._loop)
            for follower, given in zip(self._followers, arguments, strict=True)
        ]
        return lambda: [call.result() for call in calls]

    def spans(self) -> tuple[Interval, ...]:
        """See RankGroup.spans; each lasts from the call to its answer."""
        spans, self._spans = self._spans, []
        return tuple(spans)

    def mark_broken(self) -> None:
        """See RankGroup.mark_broken."""
        self._broken = True

    async def failure(self) -> StageError:
        """See RankGroup.failure. ProcessDied, with the trainer's name, if a rank died."""
        await asyncio.wait((self._failure,))
        await asyncio.wait((self._death,), timeout=self._grace_s)
        return (self._death if self._death.done() else self._failure).result()

    async def _call(self, follower: Remote, method: str, arguments: tuple[Any, ...]) -> Any:
        since = time.time()
        try:
            answer = await follower.call(method, *arguments, timeout_s=NO_TIMEOUT)
            self._spans.append(Interval(method, since, time.time(), follower.name))
            return answer
        except Exception as error:
            self._broken = True
            failure = _failure(follower.name, error)
            if isinstance(failure, ProcessDied) and not self._death.done():
                self._death.set_result(failure)
            if not self._failure.done():
                self._failure.set_result(failure)
            if failure is error:
                raise
            raise failure from error


def _failure(name: str, error: Exception) -> StageError:
    """The error with the trainer's name if the rank died, else as the rank raised it."""
    if isinstance(error, ProcessDied):
        return ProcessDied(TRAINER, f"{name}: {error.cause}", error.remedy)
    if isinstance(error, StageError):
        return error
    return StageError(name, f"{type(error).__name__}: {error}")
