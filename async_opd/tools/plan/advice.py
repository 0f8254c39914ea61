"""Advice on a run: how many GPUs each pool should get, and which staleness threshold is enough.

limits per replica ──► splits with balanced pools ──simulated──► the best split
the best split ──simulated at growing thresholds──► the smallest that keeps its bottleneck busy

Large pools are simulated at a smaller scale: replicas, samples and tokens divided by one factor.
Replicas work as in the large pool, shares of time are the same, and rates are divided by the
factor. Where replicas cannot be divided evenly, their speed is changed to compensate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_opd.tools.plan.setting import RolloutPoolSpec, Setting, TeacherPoolSpec, warmup_versions
from async_opd.tools.plan.sim.simulation import Prediction, simulate

ENOUGH = 0.97
"""A threshold is enough if it gives this share of what ``LARGE`` gives."""
LARGE = 8.0
"""A threshold at which admission never delays a rollout."""
THRESHOLDS = (*(i / 20 for i in range(21)), 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, LARGE)
SHOWN = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Thresholds of the chart."""
SAMPLES = 20_000
"""Samples to simulate at least: random lengths then change rates by less than one percent."""
MOVES = 12
"""Splits to simulate on the way to the best one."""
BARS = 9
"""Splits of the chart."""
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


@dataclass(frozen=True)
class Split:
    """Replicas of each pool, and the trainer's ranks."""

    rollout: int
    teachers: tuple[int, ...]
    ranks: int

    def apply(self, setting: Setting) -> Setting:
        """The setting with this split."""
        teachers = tuple(
            replace(teacher, replicas=count)
            for teacher, count in zip(setting.teachers, self.teachers, strict=True)
        )
        return replace(
            setting,
            rollout=replace(setting.rollout, replicas=self.rollout),
            teachers=teachers,
            ranks=self.ranks,
        )


@dataclass(frozen=True)
class Advice:
    """The best split of ``gpus`` GPUs and the smallest threshold that is enough for it.

    ``threshold_now`` is the one that is enough for the config's split. ``by_threshold`` are
    (threshold, samples per second) of the best split; ``by_rollout`` are (GPUs of the rollout pool,
    samples per second) at a large threshold, with the other GPUs split as well as possible.
    """

    gpus: int
    split: Split
    rollout_gpus: int
    threshold: float
    prediction: Prediction
    threshold_now: float
    by_threshold: tuple[tuple[float, float], ...]
    by_rollout: tuple[tuple[int, float], ...]


def advise(setting: Setting, gpus: int, seed: int = 0) -> Advice:
    """The advice for a setting. ``gpus`` has to be enough for one replica of each pool."""
    rates = _Rates(setting, seed)
    split = _best_split(setting, gpus, rates)
    best = split.apply(setting)
    threshold = rates.smallest_threshold(best)
    now = current(setting)
    return Advice(
        gpus=gpus,
        split=split,
        rollout_gpus=split.rollout * setting.rollout.gpus,
        threshold=threshold,
        prediction=rates.steady(best, threshold),
        threshold_now=rates.smallest_threshold(now.apply(setting)),
        by_threshold=tuple((s, rates.rate(best, s)) for s in sorted({*SHOWN, threshold})),
        by_rollout=tuple(_by_rollout(setting, gpus, split, rates)),
    )


def current(setting: Setting) -> Split:
    """The split of the setting."""
    teachers = tuple(teacher.replicas for teacher in setting.teachers)
    return Split(setting.rollout.replicas, teachers, setting.ranks)


class _Rates:
    """Simulated steady states by split and threshold; each is simulated once."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self._seed = seed
        self._known: dict[tuple[Split, float], Prediction] = {}
        self.rollout_limit = self._rollout_limit(setting)
        """Samples per second of one rollout replica that never waits for teachers or trainer."""

    def steady(self, setting: Setting, threshold: float) -> Prediction:
        """The steady state of the setting at a threshold."""
        key = (current(setting), threshold)
        if key not in self._known:
            wanted = replace(setting, staleness_threshold=threshold)
            self._known[key] = steady_state(wanted, self._seed)
        return self._known[key]

    def rate(self, setting: Setting, threshold: float) -> float:
        """Samples per second of that steady state."""
        return self.steady(setting, threshold).samples_per_s

    def smallest_threshold(self, setting: Setting) -> float:
        """The smallest of ``THRESHOLDS`` that is enough, by bisection."""
        wanted = ENOUGH * self.rate(setting, LARGE)
        smaller = THRESHOLDS[:-1]  # LARGE is enough by definition
        return THRESHOLDS[bisect_left(smaller, True, key=lambda s: self.rate(setting, s) >= wanted)]

    def _rollout_limit(self, setting: Setting) -> float:
        """Simulates teachers and a trainer without delays: ``Setting.limits`` has no turnaround."""
        instant = {"overhead_s": 1e-9, "tokens_per_s": 1e15, "turnaround_s": 0.0}
        teachers = tuple(
            replace(teacher, speed=teacher.speed.model_copy(update=instant))
            for teacher in setting.teachers
        )
        train = {**instant, "snapshot_s": 0.0, "sync_s": 0.0}
        alone = replace(
            setting,
            rollout=replace(setting.rollout, replicas=1),
            teachers=teachers,
            train=setting.train.model_copy(update=train),
            evaluation_every=0,
            max_version_lag=None,
            batch_size=setting.rollout.n,
            sync_steps=max(1, 2 * setting.rollout.in_flight // setting.rollout.n),
            staleness_threshold=LARGE,
        )
        steps = max(steady_steps(alone), 20 * alone.sync_steps)
        return simulate(replace(alone, steps=steps), seed=self._seed, endless=True).samples_per_s


def steady_state(setting: Setting, seed: int = 0) -> Prediction:
    """Simulates the setting without a beginning and an end, large pools at a smaller scale."""
    small, factor = shrunk(setting)
    small = replace(small, steps=steady_steps(small))
    return enlarged(simulate(small, seed=seed, endless=True), setting, factor)


def steady_steps(setting: Setting) -> int:
    """Steps that show the steady state: as long as the warm-up, and enough samples after it."""
    warm_up = warmup_versions(setting.staleness_threshold)
    versions = max(warm_up, math.ceil(SAMPLES / setting.batch_size / setting.sync_steps))
    return (warm_up + versions) * setting.sync_steps


# ── splits ─────────────────────────────────────────────────────────────────────────────────────


def _best_split(setting: Setting, gpus: int, rates: _Rates) -> Split:
    """The split whose smallest limit is largest, improved by moves that simulate faster."""
    best = _balanced(setting, gpus, rates.rollout_limit)
    rate = rates.rate(best.apply(setting), LARGE)
    moves = _affordable(setting, best, gpus)
    for _ in range(MOVES):
        if not moves:
            break
        split = moves.pop(0)
        found = rates.rate(split.apply(setting), LARGE)
        if found > 1.005 * rate:
            best, rate = split, found
            moves = _affordable(setting, best, gpus)
    return best


def _affordable(setting: Setting, split: Split, gpus: int) -> list[Split]:
    """The moves within ``gpus`` that change no number of external servers."""
    fixed = [not teacher.gpus for teacher in setting.teachers]
    return [
        move
        for move in _moves(split)
        if move.apply(setting).gpus <= gpus
        and move.ranks >= setting.least_ranks
        and all(
            old == new or not held
            for old, new, held in zip(split.teachers, move.teachers, fixed, strict=True)
        )
    ]


def _moves(split: Split) -> Iterator[Split]:
    """A few more replicas of a pool, at the cost of none or of as many of another pool."""
    counts = [split.rollout, *split.teachers, split.ranks]
    for more, count in enumerate(counts):
        size = max(1, count // 16)
        for less in (None, *range(len(counts))):
            changed = list(counts)
            changed[more] += size
            if less is not None:
                changed[less] -= size
            if less != more and min(changed) > 0:
                yield Split(changed[0], tuple(changed[1:-1]), changed[-1])


def _balanced(
    setting: Setting, gpus: int, rollout_limit: float, rollout: int | None = None
) -> Split:
    """The split whose smallest limit is largest; with ``rollout`` replicas of the student if given.

    Bisection over the throughput: it determines the replicas of each pool, and these the GPUs.
    """
    low, high = 0.0, rollout_limit * (rollout or gpus)
    fits = replace(_least(setting), rollout=rollout or 1)
    for _ in range(50):
        middle = (low + high) / 2
        split = _split_for(setting, middle, rollout_limit, rollout)
        if split is not None and split.apply(setting).gpus <= gpus:
            low, fits = middle, split
        else:
            high = middle
    return fits


def _split_for(
    setting: Setting, rate: float, rollout_limit: float, rollout: int | None
) -> Split | None:
    """The fewest replicas whose limits reach ``rate``; None if no number of ranks does."""
    ranks = _ranks_for(setting, rate)
    if ranks is None:
        return None
    least = _least(setting)
    limits = least.apply(setting).limits()
    times = [_replicas_for(rate, limits[f"teacher/{teacher.name}"]) for teacher in setting.teachers]
    if any(count > 1 and not of.gpus for count, of in zip(times, setting.teachers, strict=True)):
        return None
    teachers = tuple(a * b for a, b in zip(least.teachers, times, strict=True))
    return Split(rollout or _replicas_for(rate, rollout_limit), teachers, ranks)


def _least(setting: Setting) -> Split:
    """One replica of each pool, all external servers, and the ranks that hold the student."""
    teachers = tuple(1 if t.gpus else t.replicas for t in setting.teachers)
    return Split(1, teachers, setting.least_ranks)


def _replicas_for(rate: float, limit: float) -> int:
    return max(1, math.ceil(rate / limit - 1e-9))


def _ranks_for(setting: Setting, rate: float) -> int | None:
    """The fewest ranks that train ``rate`` samples per second; None if no number of ranks does.

    A step at this rate, less its fixed times, is the time that the ranks have for its tokens.
    """
    train = setting.train
    step_s = setting.batch_size / rate - train.snapshot_s / setting.sync_steps
    tokens_s = step_s - train.turnaround_s - train.overhead_s
    if tokens_s <= 0:
        return None
    tokens = setting.batch_size * (setting.prompt_tokens + setting.response_tokens)
    speedup = tokens / tokens_s / train.tokens_per_s
    return max(setting.least_ranks, 1 + math.ceil((speedup - 1) / train.scaling - 1e-9))


def _by_rollout(
    setting: Setting, gpus: int, best: Split, rates: _Rates
) -> Iterator[tuple[int, float]]:
    """Throughput against the rollout pool's GPUs, around the best split and at both ends."""
    each = setting.rollout.gpus
    least = _least(setting).apply(setting).gpus - each
    most = (gpus - least) // each
    even = {1 + round(i * (most - 1) / (BARS - 1)) for i in range(BARS)}
    for replicas in sorted(even | {best.rollout}):
        split = best
        if replicas != best.rollout:
            split = _balanced(setting, gpus, rates.rollout_limit, replicas)
        yield replicas * each, rates.rate(split.apply(setting), LARGE)
