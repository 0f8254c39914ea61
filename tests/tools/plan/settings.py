"""Small settings with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan
from async_opd.tools.plan.setting import Lengths, RolloutPoolSpec, Setting, TeacherPoolSpec

LENGTH, PROMPT = 100, 20


def rollouts(
    replicas: int = 2,
    slots: int = 16,
    n: int = 1,
    *,
    in_flight: int | None = None,
    per_request: float = 0.0,
    turnaround_s: float = 0.0,
) -> RolloutPoolSpec:
    """Replicas whose steps take 0.01 s, and ``per_request`` for each request."""
    speed = RolloutPlan(step_s=0.01, step_s_per_request=per_request, turnaround_s=turnaround_s)
    return RolloutPoolSpec(replicas, 1, speed, slots, in_flight or slots, n)


def teacher(
    name: str,
    replicas: int,
    batch: int,
    overhead_s: float,
    tokens_per_s: float,
    share: float = 1.0,
    turnaround_s: float = 0.0,
) -> TeacherPoolSpec:
    """A teacher with these speeds."""
    speed = TeacherPlan(overhead_s=overhead_s, tokens_per_s=tokens_per_s, turnaround_s=turnaround_s)
    return TeacherPoolSpec(name, replicas, 1, speed, batch, share)


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
        rollout=rollouts(replicas, slots, n),
        teachers=(teacher("a", 1, 32, 0.0, teacher_tokens_per_s),),
        train=TrainPlan(tokens_per_s=train_tokens_per_s, snapshot_s=snapshot_s, sync_s=sync_s),
        ranks=1,
        queue_samples=100_000,
    )
    return replace(plain, **others)
