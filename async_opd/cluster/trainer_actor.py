"""Builds the training stage in rank 0's actor, which dispatches to the other ranks in theirs.

learner's thread ──dispatch──► event loop ──remote calls──► Follower in rank 1 … N-1
      ▲ results ◄──────────────┘ the first failure ──► failure()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from async_opd.cluster.network import own_address
from async_opd.cluster.proxies import NO_TIMEOUT
from async_opd.cluster.remote import Remote
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ProcessDied, StageError
from async_opd.core.reports import Interval
from async_opd.core.stages import TRAINER, Queue
from async_opd.models.engine_args import Device
from async_opd.sharing.gpu_turns import GpuTurns
from rollouter.transports import chosen, transport
from trainer.batcher import MIN_REMEMBERED, REMEMBERED_BUDGETS, Batcher
from trainer.publisher import Transport, publisher_of
from trainer.rank_group import GRACE_S, SINGLE_RANK, RankSpec, Results
from trainer.replay.replayer import Replayer
from trainer.stage import TrainerStage
from trainer.vision.fetching import cache_of


def build_trainer(
    config: RunConfig,
    device: Device,
    queue: Queue,
    spec: RankSpec | None = None,
    followers: Sequence[Remote] = (),
) -> TrainerStage:
    """The stage of rank 0 with learner and publisher. ``spec``: rank 0 is one of several."""
    from trainer.build import build_learner
    from trainer.student.reference import rows_to_compare

    rank_group = RemoteRankGroup(followers) if followers else SINGLE_RANK
    learner = build_learner(config, device, spec, rank_group)
    batcher = build_batcher(config, queue)
    return TrainerStage(
        learner,
        publisher_of(config, learner, lambda: _transport(config, device)),
        batcher,
        max_version_lag=config.async_.max_version_lag,
        model_dir=config.student.model,
        rank_group=rank_group,
        held_rows=rows_to_compare(config, learner.model, learner.sight),
        turns=GpuTurns() if config.rollout.host is not None else None,
        media=cache_of(lambda: batcher.queue, learner.sight),
    )


def build_replayer(
    config: RunConfig,
    device: Device,
    _: None,
    spec: RankSpec | None = None,
    followers: Sequence[Remote] = (),
) -> Replayer:
    """Computes kept steps again, with the learner of ``build_trainer``; it has no queue."""
    from trainer.build import build_learner

    rank_group = RemoteRankGroup(followers) if followers else SINGLE_RANK
    learner = build_learner(config, device, spec, rank_group)
    return Replayer(learner, rank_group, offloaded=config.rollout.host is not None)


def build_batcher(config: RunConfig, queue: Queue) -> Batcher:
    """The batcher with the settings of the config."""
    return Batcher(
        queue,
        batch_size=config.train.batch_size,
        max_version_lag=config.async_.lag_to("requeue"),
        group_size=config.rollout.n if config.reward is not None else 1,
        remembered=max(MIN_REMEMBERED, REMEMBERED_BUDGETS * config.max_in_flight),
        payloads=config.train.ranks == 1,
    )


COLLECTIVE_TIMEOUT_SHARE = 0.75
"""Share of ``sync.timeout_s``: a collective times out before the call that waits for it. A member
that still answers its call is then known not to be the one that hangs."""


def _transport(config: RunConfig, device: Device) -> Transport:
    chunk_bytes, timeout_s = (
        config.sync.chunk_mib << 20,
        config.sync.timeout_s * COLLECTIVE_TIMEOUT_SHARE,
    )
    made = transport(chosen(config.sync_backend, device))
    sender = made.sender(own_address(config.cluster), timeout_s, chunk_bytes)
    sender.ports = config.cluster.port_range
    sender.seconds_per_byte = config.sync.seconds_per_byte
    return sender


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

    def dispatch(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Results:
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
