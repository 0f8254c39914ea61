"""Builds the training stage inside of its actor, and the other ranks inside of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from async_opd.cluster.crew import RemoteCrew
from async_opd.cluster.host import Remote
from async_opd.core.admission import most_in_flight
from async_opd.core.config import RunConfig
from async_opd.core.engine_args import Device
from async_opd.core.seat import Seat
from async_opd.core.stages import Queue
from trainer.crew import ALONE
from trainer.intake import BUDGETS, REMEMBERED, Intake
from trainer.publish import GlooTransport, Publisher, Transport
from trainer.stage import TrainerStage

if TYPE_CHECKING:
    from trainer.rank import Follower


def build_trainer(
    config: RunConfig,
    device: Device,
    queue: Queue,
    seat: Seat | None = None,
    followers: Sequence[Remote] = (),
) -> TrainerStage:
    """Learner, publisher and stage of rank 0; with a ``seat``, of the first of several ranks."""
    import torch

    from trainer.build import build_learner

    torch.set_num_threads(config.train.threads)
    crew = RemoteCrew(followers) if followers else ALONE
    learner = build_learner(config, device, seat, crew)
    return TrainerStage(
        learner,
        Publisher(learner.named_weights, lambda: _transport(config, device)),
        build_intake(config, queue),
        max_version_lag=config.async_.max_version_lag,
        model_dir=config.student.model,
        crew=crew,
    )


def build_follower(config: RunConfig, device: Device, seat: Seat) -> Follower:
    """Another rank."""
    import torch

    from trainer.build import build_follower

    torch.set_num_threads(config.train.threads)
    return build_follower(config, device, seat)


def build_intake(config: RunConfig, queue: Queue) -> Intake:
    """Takes batches as the config says."""
    requeue = config.async_.on_stale == "requeue"
    return Intake(
        queue,
        batch_size=config.train.batch_size,
        max_version_lag=config.async_.max_version_lag if requeue else None,
        group_size=config.rollout.n if config.reward is not None else 1,
        remembered=max(REMEMBERED, BUDGETS * most_in_flight(config)),
    )


GROUP_SHARE = 0.75
"""Of ``sync.timeout_s``: a collective ends before the call that waits for it, so that who still
answers is known not to be the one that hangs."""


def _transport(config: RunConfig, device: Device) -> Transport:
    chunk_bytes, timeout_s = config.sync.chunk_mib << 20, config.sync.timeout_s * GROUP_SHARE
    if device == "cuda" and config.sync.backend != "gloo":
        from rollouter.nccl_transport import NcclTransport

        return NcclTransport(timeout_s, chunk_bytes)
    host = ray.util.get_node_ip_address() if config.cluster.address else "127.0.0.1"
    return GlooTransport(host, timeout_s, chunk_bytes)
