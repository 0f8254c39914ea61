"""Simulates large pools at a smaller scale: replicas, samples and tokens divided by one factor.

Replicas work as in the large pool, shares of time are the same, and rates are divided by the
factor. Where replicas cannot be divided evenly, their speed is changed to compensate.
"""

from __future__ import annotations

from dataclasses import replace

from async_opd.tools.plan.prediction import Prediction
from async_opd.tools.plan.setting import RolloutPoolSpec, Setting, TeacherPoolSpec

MAX_REPLICAS = 128
"""Replicas of the largest pool at the smaller scale."""


def shrunk(setting: Setting) -> tuple[Setting, float]:
    """The setting at a scale at which no pool is above MAX_REPLICAS, and the factor."""
    largest = max(setting.rollout.replicas, *(teacher.replicas for teacher in setting.teachers))
    if largest <= MAX_REPLICAS:
        return setting, 1.0
    n = setting.rollout.n
    batch = max(1, round(setting.batch_size * MAX_REPLICAS / largest / n)) * n
    factor = setting.batch_size / batch
    rate = setting.train.tokens_per_s / factor  # a step has fewer tokens, and takes as long
    small = replace(
        setting,
        batch_size=batch,
        rollout=_rollout(setting.rollout, factor),
        teachers=tuple(_teacher(teacher, factor) for teacher in setting.teachers),
        train=setting.train.model_copy(update={"tokens_per_s": rate}),
        queue_samples=max(batch, round(setting.queue_samples / factor)),
    )
    return small, factor


def enlarged(prediction: Prediction, setting: Setting, factor: float) -> Prediction:
    """Takes a prediction at the smaller scale to the setting's scale."""
    counts = [
        setting.rollout.replicas,
        *(teacher.replicas for teacher in setting.teachers),
        setting.ranks,
    ]
    pools = tuple(
        replace(pool, replicas=count, limit=pool.limit * factor)
        for pool, count in zip(prediction.pools, counts, strict=True)
    )
    return replace(
        prediction,
        samples_per_s=prediction.samples_per_s * factor,
        pools=pools,
        queues={topic: count * factor for topic, count in prediction.queues.items()},
    )


def _fewer(replicas: int, factor: float) -> tuple[int, float]:
    """The replicas at the smaller scale, and the factor by which each has to be faster."""
    fewer = max(1, round(replicas / factor))
    return fewer, replicas / factor / fewer


def _rollout(pool: RolloutPoolSpec, factor: float) -> RolloutPoolSpec:
    replicas, faster = _fewer(pool.replicas, factor)
    step_s, each_s = pool.speed.step_s / faster, pool.speed.step_s_per_request / faster
    speed = pool.speed.model_copy(update={"step_s": step_s, "step_s_per_request": each_s})
    return replace(pool, replicas=replicas, speed=speed)


def _teacher(pool: TeacherPoolSpec, factor: float) -> TeacherPoolSpec:
    replicas, faster = _fewer(pool.replicas, factor)
    overhead_s, rate = pool.speed.overhead_s / faster, pool.speed.tokens_per_s * faster
    speed = pool.speed.model_copy(update={"overhead_s": overhead_s, "tokens_per_s": rate})
    return replace(pool, replicas=replicas, speed=speed)
