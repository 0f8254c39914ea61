"""Builds learner and followers from the config: each rank in a separate process.

directory ──► EmptyStudent ──(join, shard)──► fill ──► Learner in rank 0, Follower in the others
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from async_opd.config.device_defaults import offloads, train_threads
from async_opd.core.stages import Queue
from async_opd.models.engine_args import Device, engine_dtype
from trainer.batches.token_weights import TokenWeighting
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.losses.teacher_heads import load_heads
from trainer.rank import Rank
from trainer.rank_group import SINGLE_RANK, RankGroup, RankSpec
from trainer.recorder import recorder_of
from trainer.replay.keeper import Keeper
from trainer.student.check import check_placed, check_student
from trainer.student.loading import empty_student, fill_student
from trainer.student.placed import PlacedStudent
from trainer.student.quantization import SentMatrices
from trainer.student.sharding import join_mesh, lone_mesh
from trainer.vision.images import sight_of

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig


def build_learner(
    config: RunConfig,
    device_name: Device,
    spec: RankSpec | None = None,
    rank_group: RankGroup = SINGLE_RANK,
) -> Learner:
    """The learner of a single rank; with a ``spec``, of the first of several (see build_rank)."""
    from async_opd.config.sections.loss import cuts

    teachers = {name: teacher.weight for name, teacher in config.teachers.items()}
    max_tokens = config.response_tokens
    max_lag = config.async_.lag_to("mask")
    weighting = TokenWeighting.of(config.loss, config.reward, max_tokens, teachers, max_lag)
    learner = Learner(build_rank(config, device_name, spec), weighting, rank_group)
    rollout = config.rollout
    learner.comparable = not cuts(rollout.top_p, rollout.top_k, rollout.min_p)
    return learner


def build_follower(
    config: RunConfig, device_name: Device, spec: RankSpec, queue: Queue | None = None
) -> Follower:
    """The follower of a rank other than the first (see build_rank); it fetches from the queue."""
    return Follower(build_rank(config, device_name, spec), queue)


def build_rank(config: RunConfig, device_name: Device, spec: RankSpec | None) -> Rank:
    """Seeds torch, loads the student in float32, and checks its packed logits.

    Sets the number of torch's threads. With a ``spec`` it waits until all ranks have
    connected, shards the empty student, and reads only this rank's weights. StageError for a
    student that the trainer would compute wrongly.
    """
    torch.manual_seed(config.seed)
    device = torch.device(device_name)
    student = empty_student(config, device)
    cores = len(os.sched_getaffinity(0))
    entries = sum(p.numel() for p in student.model.parameters())
    torch.set_num_threads(train_threads(config, device_name, cores, entries))
    objective = build_objective(config.loss, config.reward, config.rollout.temperature)
    heads = load_heads(config, len(student.model.get_output_embeddings().weight), device)
    mesh = None if spec is None else join_mesh(spec, device, config.train.replicate)
    if spec is None and offloads(config.train, device_name) == "parameters":
        mesh = lone_mesh(device)
    wire_dtype = getattr(torch, engine_dtype(config.rollout.engine, device_name))
    exact = torch.empty(0)

    def fill() -> None:
        nonlocal exact
        exact = check_student(fill_student(student, config, device, spec), student.longest)

    placed = PlacedStudent(
        student.model,
        objective,
        config.train,
        device,
        heads,
        mesh,
        fill,
        config.timeouts.collective_s,
    )
    check_placed(placed, exact, student.longest)
    placed.sight = sight_of(config, student.model, device)
    if config.sync.fake_quantization is not None:
        placed.sent = SentMatrices(wire_dtype, config.sync.fake_quantization)
        if config.sync.verify_every:
            with placed.sent.within(student.model):
                pass  # a matrix that it cannot compute with is refused before the first step
    rank = Rank(placed, wire_dtype)
    rank.recorder = recorder_of(config, 0 if spec is None else spec.rank)
    if config.log.replay:
        number, ranks = (0, 1) if spec is None else (spec.rank, spec.ranks)
        rank.keeper = Keeper(config, number, ranks, rank.platform())
    if config.rollout.host is not None:
        rank.offload()  # until its first turn
    return rank
