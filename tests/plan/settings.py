"""Small settings with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from async_opd.plan.measure.speeds import DecodeSpeed, Lengths, ScoreSpeed, TrainSpeed
from async_opd.plan.setting import RolloutPoolSpec, Setting, TeacherPoolSpec, TrainerPoolSpec

LENGTH, PROMPT = 100, 20


def setting(
    *,
    replicas: int = 2,
    slots: int = 16,
    n: int = 1,
    sigma: float = 0.0,
    teacher_tokens_per_s: float = 1e6,
    train_tokens_per_s: float = 1e6,
    snapshot_s: float = 0.0,
    sync_s: float = 0.0,
    **others: Any,
) -> Setting:
    """By default rollouts are the bottleneck: teachers and trainer are much faster."""
    plain = Setting(
        steps=60,
        batch_size=32,
        sync_steps=2,
        staleness_threshold=2.0,
        lengths=Lengths(LENGTH, sigma, 1000),
        prompt_tokens=PROMPT,
        rollout=RolloutPoolSpec(replicas, 1, DecodeSpeed(slots, 0.01, 0.0), slots, n),
        teachers=(TeacherPoolSpec("a", 1, 1, ScoreSpeed(32, 0.0, teacher_tokens_per_s), 1.0),),
        train=TrainerPoolSpec(1, TrainSpeed(0.0, train_tokens_per_s, snapshot_s, sync_s), 0.9),
        queue_samples=100_000,
    )
    return replace(plain, **others)
