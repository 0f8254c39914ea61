"""Builds learner and followers as the config says: each rank in its own process.

directory ──load_student──► model ──(join, shard)──► Learner in rank 0, Follower in the others
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.positions import Positions, max_model_len
from async_opd.core.seat import Seat
from trainer.crew import ALONE, Crew
from trainer.heads import load_heads
from trainer.learner import Learner
from trainer.losses import Head, Objective, build_objective
from trainer.rank import Follower, Rank
from trainer.sharding import join
from trainer.shares import Shares
from trainer.student import load_student
from trainer.student_check import check_student

if TYPE_CHECKING:
    from async_opd.core.config import RunConfig


def build_learner(
    config: RunConfig, device_name: str, seat: Seat | None = None, crew: Crew = ALONE
) -> Learner:
    """Seeds torch, loads the student in float32 and checks that its logits come out right.

    With a ``seat`` it is the first of several ranks, and waits until all have come together.
    """
    made = _Ingredients.of(config, device_name)
    if seat is not None:
        check_student(
            made.model, torch.device("cpu"), nullcontext(), made.longest
        )  # not yet sharded
    mesh = None if seat is None else join(seat, made.device)
    shares = Shares.of(
        config.loss,
        config.reward,
        config.rollout.max_tokens,
        {name: teacher.weight for name, teacher in config.teachers.items()},
    )
    learner = Learner(
        made.model, made.objective, config.train, made.device, shares, made.heads, mesh, crew
    )
    if seat is None:
        learner.check(made.longest)
    return learner


def build_follower(config: RunConfig, device_name: str, seat: Seat) -> Follower:
    """Another rank than the first; waits until all have come together."""
    made = _Ingredients.of(config, device_name)
    mesh = join(seat, made.device)
    return Follower(Rank(made.model, made.objective, config.train, made.device, made.heads, mesh))


@dataclass(frozen=True)
class _Ingredients:
    """What every rank is made of."""

    model: Any
    objective: Objective
    heads: Mapping[str, Head]
    device: torch.device
    longest: int | None
    """Tokens of the longest sequence of the student's engines."""

    @classmethod
    def of(cls, config: RunConfig, device_name: str) -> _Ingredients:
        torch.manual_seed(config.seed)
        device = torch.device(device_name)
        model = load_student(config, device)
        objective = build_objective(config.loss, config.reward, config.rollout.temperature)
        heads = load_heads(config, len(model.get_output_embeddings().weight), device)
        settings = model.config.get_text_config().to_dict()
        longest = Positions.of(settings, max_model_len(config.rollout.engine)).longest
        return cls(model, objective, heads, device, longest)
