"""How each pool spent its time: shares of computing and of waiting, by what it waited for.

metrics of steps ──► PoolTime of rollout, of each teacher, of the trainer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_opd.config.sections.elastic import Pooled
from async_opd.files.lines import MetricsRow
from async_opd.observability.metering import POOLS_S, between_reports
from async_opd.tools.plan.inputs import slots_of
from async_opd.tools.plan.setting import warmup_versions
from async_opd.tools.report.recorded_run import STEP_S, RecordedRun

COMPUTING = "computing"
SYNC, PROMPTS = "weight sync", "prompts (staleness budget)"
GPUS = "GPUs that other pools use"
ROLLOUTS, SCORED, OTHER = "rollouts", "scored samples", "other work of the trainer's process"


@dataclass(frozen=True)
class PoolTime:
    """Shares of a pool's time, from 0 to 1, which add up to 1; ``computing`` is the first.

    The share ``computing`` of the rollout pool is that of its slots which held a request.
    """

    name: str
    shares: Mapping[str, float]

    @property
    def computing(self) -> float:
        """The share of its time in which the pool computed."""
        return self.shares[COMPUTING]

    @property
    def in_use(self) -> float:
        """The share in which it computed, or others had the GPUs that it shares with them."""
        return self.shares[COMPUTING] + self.shares.get(GPUS, 0.0)

    @property
    def waits(self) -> dict[str, float]:
        """The other shares, the largest first."""
        rest = {name: share for name, share in self.shares.items() if name != COMPUTING}
        return dict(sorted(rest.items(), key=lambda item: -item[1]))


def steady_rows(run: RecordedRun) -> tuple[MetricsRow, ...]:
    """The steps without warm-up, and without the end, when nothing is admitted any more.

    At most the first half and the last quarter of the steps are left out.
    """
    config, steps = run.config, run.steps
    threshold, sync_steps = config.async_.staleness_threshold, config.async_.sync_steps
    warm = min(warmup_versions(threshold) * sync_steps, len(steps) // 2)
    drained = 0
    if steps and steps[-1].step >= config.train.steps:
        drained = min(math.ceil(1 + threshold) * sync_steps, len(steps) // 4)
    return tuple(between_reports(steps, warm, len(steps) - drained))


def pool_times(run: RecordedRun, rows: Sequence[MetricsRow]) -> tuple[PoolTime, ...]:
    """The times of ``run.pools`` over these steps; empty for no steps."""
    seconds = total(rows, STEP_S)
    if seconds <= 0:
        return ()
    teachers = (
        _pool(pool, {COMPUTING: total(rows, f"{pool}/busy_s") / seconds / replicas}, ROLLOUTS)
        for pool, replicas in (
            (f"teacher/{name}", _replicas(one, rows, f"teacher/{name}/serving"))
            for name, one in run.config.teachers.items()
        )
    )
    return (_rollout(run, rows, seconds), *teachers, _train(rows, seconds))


def total(rows: Sequence[MetricsRow], key: str) -> float:
    """The sum of a metric over the steps; 0 where it was not reported."""
    return sum(row.values.get(key, 0.0) for row in rows)


def mean(rows: Sequence[MetricsRow], key: str) -> float:
    """The mean of a metric over the steps that report it; 0 if none does."""
    found = [row.values[key] for row in rows if key in row.values]
    return sum(found) / len(found) if found else 0.0


def _replicas(section: Pooled, rows: Sequence[MetricsRow], key: str) -> float:
    """The replicas of a pool; of one that follows the cluster the mean of those that served."""
    fewest, most = section.min_replicas, section.max_replicas
    return max(mean(rows, key) if fewest < most else fewest, 1)


def _rollout(run: RecordedRun, rows: Sequence[MetricsRow], seconds: float) -> PoolTime:
    """``request_s`` leaves out pauses, so that both are parts of the pool's time.

    An evaluation takes none of it: no rollout waits for a slot because of one.
    """
    replicas = _replicas(run.config.rollout, rows, "rollout/replicas")
    all_slots = replicas * slots_of(run.config)
    limited = [row.values for row in rows if "rollout/limit" in row.values]
    limited_s = sum(values.get(POOLS_S, values[STEP_S]) for values in limited)
    slot_s = sum(one["rollout/limit"] * one.get(POOLS_S, one[STEP_S]) for one in limited)
    slots = slot_s / limited_s if limited_s else all_slots
    shares = {
        COMPUTING: total(rows, "rollout/request_s") / max(slots * seconds, 1e-9),
        SYNC: total(rows, "rollout/paused_s") / seconds / replicas,
    }
    if any("rollout/wait_gpu_s" in row.values for row in rows):
        shares[GPUS] = total(rows, "rollout/wait_gpu_s") / seconds / replicas
    return _pool("rollout", shares, PROMPTS)


def _train(rows: Sequence[MetricsRow], seconds: float) -> PoolTime:
    shares = {
        COMPUTING: total(rows, "train/busy_s") / seconds,
        SCORED: total(rows, "train/wait_s") / seconds,
        SYNC: total(rows, "sync/trainer_wait_s") / seconds,
    }
    if any("train/wait_gpu_s" in row.values for row in rows):
        shares[GPUS] = total(rows, "train/wait_gpu_s") / seconds
    return _pool("train", shares, OTHER)


def _pool(name: str, shares: Mapping[str, float], rest: str) -> PoolTime:
    """The shares, each cut so that they add up to at most 1, and ``rest`` for what is left."""
    left, cut = 1.0, dict[str, float]()
    for what, share in shares.items():
        cut[what] = min(max(share, 0.0), left)
        left -= cut[what]
    return PoolTime(name, {**cut, rest: left})
