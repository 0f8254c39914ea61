"""Builds learner and followers as the config says: each rank in its own process.

directory ──load_student──► model ──(join, shard)──► Learner in rank 0, Follower in the others
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.rank_spec import RankSpec
from async_opd.models.rope import Positions, max_model_len
from trainer.batches.token_weights import TokenWeighting
from trainer.learner import Learner
from trainer.losses import Head, Objective, build_objective
from trainer.rank import Follower, Rank
from trainer.rank_group import SINGLE_RANK, RankGroup
from trainer.student.check import check_student
from trainer.student.loading import load_student
from trainer.student.sharding import join_mesh
from trainer.teacher_heads import load_heads

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig


def build_learner(
    config: RunConfig,
    device_name: str,
    spec: RankSpec | None = None,
    rank_group: RankGroup = SINGLE_RANK,
) -> Learner:
    """Seeds torch, loads the student in float32 and checks that its logits come out right.

    With a ``spec`` it is the first of several ranks, and waits until all have come together.
    """
    made = _RankInputs.of(config, device_name)
    if spec is not None:
        check_student(
            made.model, torch.device("cpu"), nullcontext(), made.longest
        )  # not yet sharded
    mesh = None if spec is None else join_mesh(spec, made.device)
    weighting = TokenWeighting.of(
        config.loss,
        config.reward,
        config.rollout.max_tokens,
        {name: teacher.weight for name, teacher in config.teachers.items()},
    )
    learner = Learner(
        made.model,
        made.objective,
        config.train,
        made.device,
        weighting,
        made.heads,
        mesh,
        rank_group,
    )
    if spec is None:
        learner.check(made.longest)
    return learner


def build_follower(config: RunConfig, device_name: str, spec: RankSpec) -> Follower:
    """Another rank than the first; waits until all have come together."""
    made = _RankInputs.of(config, device_name)
    mesh = join_mesh(spec, made.device)
    return Follower(Rank(made.model, made.objective, config.train, made.device, made.heads, mesh))


@dataclass(frozen=True)
class _RankInputs:
    """What every rank is made of."""

    model: Any
    objective: Objective
    heads: Mapping[str, Head]
    device: torch.device
    longest: int | None
    """Tokens of the longest sequence of the student's engines."""

    @classmethod
    def of(cls, config: RunConfig, device_name: str) -> _RankInputs:
        torch.manual_seed(config.seed)
        device = torch.device(device_name)
        model = load_student(config, device)
        objective = build_objective(config.loss, config.reward, config.rollout.temperature)
        heads = load_heads(config, len(model.get_output_embeddings().weight), device)
        settings = model.config.get_text_config().to_dict()
        longest = Positions.of(settings, max_model_len(config.rollout.engine)).longest
        return cls(model, objective, heads, device, longest)
