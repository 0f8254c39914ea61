"""The verdict on a run: what limits its throughput, in words, with what was measured.

pool_times, places of samples ──► healthy · a pool limits · weight sync · grader · long responses ·
                                 staleness budget

Rules, in this order. A pool is *saturated* if it computes at least 1 - ``LOST`` of its time, and
*starved* if it waits for ``LOST`` or more.
1. Neither the rollout pool nor the trainer waits for ``LOST`` of its time: the run is healthy.
2. No other pool is saturated, and weight syncs cost the rollout pool or the trainer ``LOST``.
3. The pool that computes most is saturated: it limits, and the pools that wait for it are starved.
4. None is saturated: each sample waits for something that has no pool. It is the grader if most
   samples in flight are with it; long responses if their lengths are spread more than those of an
   exponential distribution; or else the budget, with which rollout and training take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from async_opd.files.lines import MetricsRow
from async_opd.tools.report.pool_times import (
    PROMPTS,
    SCORED,
    SYNC,
    PoolTime,
    mean,
    pool_times,
    steady_rows,
    total,
)
from async_opd.tools.report.recorded_run import STEP_S, RecordedRun

LOST = 0.2
"""Share of a pool's time: one that waits for less is not starved."""
EXPONENTIAL = 1.0
"""Standard deviation over mean of an exponential distribution."""
MIN_STEPS = 6

Kind = Literal["healthy", "pool", "sync", "grader", "lengths", "budget", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """``pool`` is the one that limits, for kind ``pool``. ``starved`` are pools that wait for it.

    ``headline`` is one sentence, ``evidence`` what was measured, ``remedy`` what to change.
    """

    kind: Kind
    headline: str
    evidence: tuple[str, ...]
    remedy: str
    pool: str = ""
    starved: tuple[str, ...] = ()
    times: tuple[PoolTime, ...] = ()


def judge(run: RecordedRun) -> Verdict:
    """The verdict over the steps of ``steady_rows``; of kind ``unknown`` for fewer than 6."""
    rows = steady_rows(run)
    case = _Case(run, rows, pool_times(run, rows))
    if len(rows) >= MIN_STEPS and case.times:
        return _judged(case)
    return Verdict(
        "unknown",
        f"The run has too few steps for a verdict: {len(rows)} after the warm-up.",
        case.evidence if case.times else (),
        f"Let it make {MIN_STEPS} steps after the warm-up.",
        times=case.times,
    )


@dataclass(frozen=True)
class _Case:
    """A run that is judged: its steady steps, and how its pools spent their time."""

    run: RecordedRun
    rows: Sequence[MetricsRow]
    times: tuple[PoolTime, ...]

    def mean(self, key: str) -> float:
        """Of a metric over the steps that report it; 0 if none does."""
        return mean(self.rows, key)

    def pool(self, name: str) -> PoolTime:
        """The times of a pool."""
        return next(one for one in self.times if one.name == name)

    @property
    def busiest(self) -> PoolTime:
        """The pool that computes most."""
        return max(self.times, key=lambda pool: pool.computing)

    @property
    def places(self) -> dict[str, float]:
        """See ``samples_by_place``."""
        return samples_by_place(self.run, self.rows)

    @property
    def evidence(self) -> tuple[str, ...]:
        """A line for each pool, and the places of samples."""
        places = {k: v for k, v in self.places.items() if v >= 0.5}
        in_flight = ", ".join(f"{name} {n:.0f}" for name, n in places.items())
        return (
            *(_shares(pool) for pool in self.times),
            f"samples in flight: {in_flight or 'none at the ends of steps'}",
            f"{samples_per_s(self.run, self.rows):.3g} samples/s, staleness "
            f"{self.mean('staleness/mean'):.2f} on average",
        )

    def verdict(self, kind: Kind, headline: str, remedy: str, *evidence: str) -> Verdict:
        """With this evidence before that of all pools."""
        return Verdict(kind, headline, (*evidence, *self.evidence), remedy, times=self.times)


def _judged(case: _Case) -> Verdict:
    rollout, train, busiest = case.pool("rollout"), case.pool("train"), case.busiest
    if max(1 - rollout.in_use, 1 - train.in_use) < LOST:
        return _healthy(case)
    saturated = busiest.computing >= 1 - LOST
    sync = max(rollout.shares[SYNC], train.shares[SYNC])
    if sync >= LOST and (not saturated or busiest is rollout):
        return _sync(case)
    if saturated:
        return _limits(case, busiest)
    places = case.places
    if places["grader"] > 0 and places["grader"] == max(places.values()):
        return _grader(case)
    return _lengths(case) if spread(case.rows) > EXPONENTIAL else _budget(case)


# ── what was measured ──────────────────────────────────────────────────────────────────────────


def samples_by_place(run: RecordedRun, rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Mean number of samples in each place of the pipeline, in the order in which they pass it.

    The numbers were read at the ends of steps; ``prompts`` counts the rollouts of waiting groups.
    """
    names = run.config.teachers
    return {
        "prompts": mean(rows, "queue/prompts/ready") * run.config.rollout.n,
        "rollout": mean(rows, "rollout/in_flight"),
        "grader": mean(rows, "rollout/grading"),
        "rollouts": sum(mean(rows, f"queue/rollouts/{name}/ready") for name in names),
        "teachers": sum(mean(rows, f"queue/rollouts/{name}/leased") for name in names),
        "scored": mean(rows, "queue/scored/ready"),
        "train": mean(rows, "queue/scored/leased"),
    }


def spread(rows: Sequence[MetricsRow]) -> float:
    """Standard deviation over mean of the response lengths of all steps; 0 if unknown."""
    lengths = [
        (row.values["train/mean_response_tokens"], row.values.get("train/std_response_tokens", 0.0))
        for row in rows
        if "train/mean_response_tokens" in row.values
    ]
    if not lengths:
        return 0.0
    center = sum(mean_ for mean_, _ in lengths) / len(lengths)
    square = sum(std**2 + mean_**2 for mean_, std in lengths) / len(lengths)
    return float(max(square - center**2, 0.0) ** 0.5 / center) if center else 0.0


def samples_per_s(run: RecordedRun, rows: Sequence[MetricsRow]) -> float:
    """Trained samples per second of these steps."""
    return run.config.train.batch_size * len(rows) / max(total(rows, STEP_S), 1e-9)


# ── one verdict each ───────────────────────────────────────────────────────────────────────────


def _healthy(case: _Case) -> Verdict:
    busiest = case.busiest
    return case.verdict(
        "healthy",
        f"The run is healthy: neither rollout nor training waits for a fifth of its time; "
        f"{display_name(busiest.name)} is used most ({busiest.computing:.0%}).",
        "Nothing needs to change. More GPUs help if all pools get some.",
    )


def _limits(case: _Case, pool: PoolTime) -> Verdict:
    others = [one for one in case.times if one is not pool and one.in_use < 1 - LOST]
    # Teachers are often fast enough to wait: the pool to name is one that could do more, if any.
    main = [one for one in others if one.name in ("rollout", "train")] or others
    most = min(main, key=lambda one: one.in_use)
    remedies = {
        "rollout": "Give rollout more GPUs (rollout.replicas), or larger batches per engine "
        "(rollout.engine.max_num_seqs).",
        "train": "Give training more GPUs (train.ranks), or larger micro-batches "
        "(train.tokens_per_micro_batch).",
    }
    teacher = pool.name.removeprefix("teacher/")
    of_teacher = f"Give this teacher more replicas (teachers.{teacher}.replicas)."
    found = case.verdict(
        "pool",
        f"{display_name(most.name).capitalize()} is starved {1 - most.in_use:.0%} of the time: "
        f"{display_name(pool.name)} limits, which computes {pool.computing:.0%} of the time.",
        remedies.get(pool.name, of_teacher),
    )
    return replace(found, pool=pool.name, starved=tuple(one.name for one in others))


def _sync(case: _Case) -> Verdict:
    paused, held = case.pool("rollout").shares[SYNC], case.pool("train").shares[SYNC]
    seconds = {
        key.removeprefix("sync/").removesuffix("_s"): case.mean(key)
        for key in ("sync/pause_s", "sync/transfer_s", "sync/seconds")
    }
    parts = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items() if value)
    return case.verdict(
        "sync",
        f"Weight syncs are slow: rollout is paused for them {paused:.0%} of the time, and the "
        f"trainer waits for them {held:.0%}.",
        "Sync less often (a larger async.sync_steps), group by group (sync.rolling: true), or over "
        "a faster network; a long pause with on_sync: finish is the longest response.",
        *([f"a weight sync takes: {parts}"] if parts else []),
    )


def _grader(case: _Case) -> Verdict:
    places = case.places
    share = places["grader"] / sum(places.values())
    return case.verdict(
        "grader",
        f"The grader is slow: {share:.0%} of the samples in flight are with it, and no pool is "
        "saturated.",
        "Give the grader more processes (grading.processes) or make it faster.",
        f"rollouts with the grader: {places['grader']:.3g}",
    )


def _lengths(case: _Case) -> Verdict:
    cut, longest = case.mean("train/truncated_share"), case.run.config.rollout.max_tokens
    return case.verdict(
        "lengths",
        "Response lengths have a long tail: training waits for the longest responses while slots "
        "of the engines are free.",
        "Let rollouts run further ahead (a larger async.staleness_threshold), or lower "
        "rollout.max_tokens.",
        f"lengths: mean {case.mean('train/mean_response_tokens'):.4g} tokens, spread "
        f"{spread(case.rows):.2f} times the mean, {cut:.1%} cut at {longest}",
    )


def _budget(case: _Case) -> Verdict:
    return case.verdict(
        "budget",
        "Rollout and training take turns within the staleness budget: rollout waits for it "
        f"{case.pool('rollout').shares[PROMPTS]:.0%} of the time, and training for samples "
        f"{case.pool('train').shares[SCORED]:.0%}.",
        "Raise async.staleness_threshold, if learning allows it.",
        f"async.staleness_threshold is {case.run.config.async_.staleness_threshold:g}",
    )


def _shares(pool: PoolTime) -> str:
    waits = ", ".join(f"{what} {share:.0%}" for what, share in pool.waits.items() if share >= 0.005)
    waits = f"; waits for: {waits}" if waits else ""
    return f"{display_name(pool.name)} computes {pool.computing:.0%}{waits}"


def display_name(pool: str) -> str:
    """A pool's name in a sentence."""
    if pool.startswith("teacher/"):
        return f"teacher {pool.removeprefix('teacher/')}"
    return {"train": "the trainer"}.get(pool, pool)
