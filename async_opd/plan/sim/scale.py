"""Large pools at a smaller scale: as many times fewer replicas, samples and tokens.

What a replica does is the same, and so are the shares of time; rates are as many times smaller.
Where a number of replicas cannot be divided evenly, their speed makes up for it.
"""

from __future__ import annotations

from dataclasses import replace

from async_opd.plan.prediction import Prediction
from async_opd.plan.setting import RolloutPoolSpec, Setting, TeacherPoolSpec, TrainerPoolSpec

MAX_REPLICAS = 128
"""Of the largest pool at the smaller scale."""


def shrunk(setting: Setting) -> tuple[Setting, float]:
    """The setting at a scale at which no pool is large, and how many times smaller it is."""
    largest = max(setting.rollout.replicas, *(teacher.replicas for teacher in setting.teachers))
    if largest <= MAX_REPLICAS:
        return setting, 1.0
    n = setting.rollout.n
    batch = max(1, round(setting.batch_size * MAX_REPLICAS / largest / n)) * n
    factor = setting.batch_size / batch
    small = replace(
        setting,
        batch_size=batch,
        rollout=_rollout(setting.rollout, factor),
        teachers=tuple(_teacher(teacher, factor) for teacher in setting.teachers),
        train=_train(setting.train, factor),
        queue_samples=max(batch, round(setting.queue_samples / factor)),
    )
    return small, factor


def enlarged(prediction: Prediction, setting: Setting, factor: float) -> Prediction:
    """What was predicted at the smaller scale, at that of the setting."""
    counts = [
        setting.rollout.replicas,
        *(teacher.replicas for teacher in setting.teachers),
        setting.train.ranks,
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
    """Replicas at the smaller scale, and how much faster each has to be."""
    fewer = max(1, round(replicas / factor))
    return fewer, replicas / factor / fewer


def _rollout(pool: RolloutPoolSpec, factor: float) -> RolloutPoolSpec:
    replicas, faster = _fewer(pool.replicas, factor)
    speed = replace(
        pool.speed,
        step_s=pool.speed.step_s / faster,
        step_s_per_request=pool.speed.step_s_per_request / faster,
    )
    return replace(pool, replicas=replicas, speed=speed)


def _teacher(pool: TeacherPoolSpec, factor: float) -> TeacherPoolSpec:
    replicas, faster = _fewer(pool.replicas, factor)
    speed = replace(
        pool.speed,
        overhead_s=pool.speed.overhead_s / faster,
        tokens_per_s=pool.speed.tokens_per_s * faster,
    )
    return replace(pool, replicas=replicas, speed=speed)


def _train(pool: TrainerPoolSpec, factor: float) -> TrainerPoolSpec:
    """A step has as many times fewer tokens, and takes as long."""
    return replace(pool, speed=replace(pool.speed, tokens_per_s=pool.speed.tokens_per_s / factor))
