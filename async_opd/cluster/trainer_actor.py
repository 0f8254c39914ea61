"""Builds the training stage in its actor; ``trainer.build`` builds the other ranks in theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from async_opd.cluster.actor_shell import Remote
from async_opd.cluster.network import own_address
from async_opd.cluster.remote_ranks import RemoteRankGroup
from async_opd.config.run_config import RunConfig
from async_opd.core.stages import Queue
from async_opd.models.engine_args import Device
from async_opd.waiting.gpu_turns import GpuTurns
from rollouter.transports import chosen, transport
from trainer.batcher import MIN_REMEMBERED, REMEMBERED_BUDGETS, Batcher
from trainer.publisher import Publisher, Transport
from trainer.rank_group import SINGLE_RANK
from trainer.rank_spec import RankSpec
from trainer.replay.replayer import Replayer
from trainer.stage import TrainerStage
from trainer.student.named_weights import frozen_names
from trainer.vision.fetching import cache_of


def build_trainer(
    config: RunConfig,
    device: Device,
    queue: Queue,
    spec: RankSpec | None = None,
    followers: Sequence[Remote] = (),
) -> TrainerStage:
    """The stage of rank 0 with learner and publisher. ``spec``: rank 0 is one of several."""
    from trainer.build import build_learner, rows_to_compare

    rank_group = RemoteRankGroup(followers) if followers else SINGLE_RANK
    learner = build_learner(config, device, spec, rank_group)
    batcher = build_batcher(config, queue)
    return TrainerStage(
        learner,
        Publisher(
            partial(learner.named_weights, copied=False),
            lambda: _transport(config, device),
            digests=config.sync.verify_every > 0,
            chunk_bytes=config.sync.chunk_mib << 20,
            frozen=frozen_names(learner.model),
        ),
        batcher,
        max_version_lag=config.async_.max_version_lag,
        model_dir=config.student.model,
        rank_group=rank_group,
        held_rows=rows_to_compare(config, learner),
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
    """What computes kept steps again, with the learner of ``build_trainer``; it has no queue."""
    from trainer.build import build_learner

    rank_group = RemoteRankGroup(followers) if followers else SINGLE_RANK
    learner = build_learner(config, device, spec, rank_group)
    return Replayer(learner, rank_group, offloaded=config.rollout.host is not None)


def build_batcher(config: RunConfig, queue: Queue) -> Batcher:
    """The batcher with the settings of the config."""
    requeue = config.async_.on_stale == "requeue"
    return Batcher(
        queue,
        batch_size=config.train.batch_size,
        max_version_lag=config.async_.max_version_lag if requeue else None,
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
