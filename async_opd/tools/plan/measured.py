"""The measurements of a finished run: its speeds as a ``plan`` section, and rates to compare.

run directory ──metrics.jsonl, summary.json, config.yaml──► RecordedSteps ──fits──► PlanConfig

Every fit keeps the measured total: noise affects the split into a fixed and a proportional part,
but not the predicted total of the measured run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import PlanConfig, TrainPlan
from async_opd.core.errors import ConfigError, Problem
from async_opd.files.foreign import HELD_BYTES, ForeignPath, Place, foreign
from async_opd.files.lines import MetricsRow, metrics_rows, number_of
from async_opd.files.run_format import refuse_no_run
from async_opd.observability.metering import POOLS_S, between_reports
from async_opd.tools.plan.inputs import setting_of, slots_of
from async_opd.tools.plan.setting import Lengths, Setting, mean_length, phi, warmup_versions
from async_opd.tools.plan.sim.simulation import shortened, simulate

MIN_STEPS = 6
SAMPLES = 50_000
"""Samples of each simulated run."""
ROUNDS = 8
LONGEST = 2.0
"""The longest turnaround, as a multiple of a full replica's time for one piece of work."""


def calibrate(setting: Setting, running: float, batches: Mapping[str, float]) -> Setting:
    """Finds the turnarounds that give ``running`` requests and ``batches[teacher]`` rollouts.

    The former is the mean number on a replica, the latter the mean of a batch.

    The rollout pool's is found first, by bisection, then the teachers', all at the same time.
    """
    short = shortened(setting, SAMPLES)
    pool = setting.rollout

    def full_enough(seconds: Mapping[str, float]) -> dict[str, bool]:
        found = simulate(_with_rollout(short, seconds[""]))
        return {"": found.concurrency > running}

    request_s = setting.response_tokens * pool.speed.step(pool.running)
    rollout = _bisect({"": LONGEST * request_s}, full_enough)[""]
    short = _with_rollout(short, rollout)

    def too_small(seconds: Mapping[str, float]) -> dict[str, bool]:
        found = simulate(_with_teachers(short, seconds))
        return {name: found.batches[name] < size for name, size in batches.items()}

    tokens = setting.prompt_tokens + setting.response_tokens
    longest = {
        teacher.name: LONGEST * teacher.speed.seconds(round(teacher.batch * tokens))
        for teacher in setting.teachers
    }
    return _with_teachers(_with_rollout(setting, rollout), _bisect(longest, too_small))


def _bisect(
    longest: Mapping[str, float], too_short: Callable[[Mapping[str, float]], Mapping[str, bool]]
) -> dict[str, float]:
    """The seconds of each name at which ``too_short`` becomes false; 0 if it is never true."""
    brackets = {name: [0.0, seconds] for name, seconds in longest.items()}
    for _ in range(ROUNDS):
        middle = {name: sum(bracket) / 2 for name, bracket in brackets.items()}
        for name, short in too_short(middle).items():
            brackets[name][0 if short else 1] = middle[name]
    return {name: low for name, (low, _) in brackets.items()}


def _with_rollout(setting: Setting, seconds: float) -> Setting:
    speed = setting.rollout.speed.model_copy(update={"turnaround_s": seconds})
    return replace(setting, rollout=replace(setting.rollout, speed=speed))


def _with_teachers(setting: Setting, seconds: Mapping[str, float]) -> Setting:
    return replace(
        setting,
        teachers=tuple(
            replace(t, speed=t.speed.model_copy(update={"turnaround_s": seconds[t.name]}))
            for t in setting.teachers
        ),
    )


@dataclass(frozen=True)
class MeasuredRates:
    """Rates after the warm-up; ``wall_s`` is that of the whole run, None if it has not ended."""

    samples_per_s: float
    wall_s: float | None
    busy: Mapping[str, float]
    mean_staleness: float
    max_staleness: int


@dataclass(frozen=True)
class MeasuredRun:
    """A run's config with its measured speeds and rates."""

    config: RunConfig
    plan: PlanConfig
    measured: MeasuredRates


def read_run(run_dir: Place) -> MeasuredRun:
    """Reads a run directory. ConfigError if files or metrics are missing or of another format."""
    refuse_no_run(run_dir)
    config_file = foreign(run_dir) / "config.yaml"
    config = load_config(config_file, recorded=True)
    record = RecordedSteps(config, foreign(run_dir))
    plan = record.plan()
    setting = setting_of(config, plan, str(config_file))
    plan = _with_turnarounds(plan, record.calibrated(setting))
    return MeasuredRun(config, plan, record.measured())


def _with_turnarounds(plan: PlanConfig, setting: Setting) -> PlanConfig:
    tree = plan.model_dump()
    tree["rollout"]["turnaround_s"] = _rounded(setting.rollout.speed.turnaround_s)
    for teacher in setting.teachers:
        tree["teachers"][teacher.name]["turnaround_s"] = _rounded(teacher.speed.turnaround_s)
    return PlanConfig.model_validate(tree)


class RecordedSteps:
    """The metrics of each step after the warm-up, as arrays, and those of the evaluations."""

    def __init__(self, config: RunConfig, run_dir: ForeignPath) -> None:
        self._config = config
        rows = _rows(run_dir / "metrics.jsonl")
        steps = [row for row in rows if "perf/step_s" in row.values]
        versions = warmup_versions(config.async_.staleness_threshold)
        warm = min(config.async_.sync_steps * versions, len(steps) // 2)
        self._steps = between_reports(steps, warm, len(steps))
        self._check(run_dir)
        self._all_s = sum(row.values["perf/step_s"] for row in steps)
        self._seconds = float(self._of("perf/step_s").sum())
        self._covered = np.array(
            [row.values.get(POOLS_S, row.values["perf/step_s"]) for row in self._steps]
        )
        self._evaluations = [
            (row.time - row.values["eval/seconds"], row.time)
            for row in rows
            if "eval/seconds" in row.values and row.step < config.train.steps
        ]
        self._wall_s = _wall_s(run_dir / "summary.json")

    def measured(self) -> MeasuredRates:
        """Rates, shares and staleness."""
        replicas = {"rollout": self._config.rollout.min_replicas, "train": 1}
        replicas |= {f"teacher/{name}": t.min_replicas for name, t in self._config.teachers.items()}
        return MeasuredRates(
            samples_per_s=self._config.train.batch_size * len(self._steps) / self._seconds,
            wall_s=self._wall_s,
            busy={
                pool: float(self._of(f"{pool}/busy_s").sum()) / self._seconds / count
                for pool, count in replicas.items()
            },
            mean_staleness=float(self._of("staleness/mean").mean()),
            max_staleness=int(self._of("staleness/max").max()),
        )

    def plan(self) -> PlanConfig:
        """The speeds; the turnaround of the rollout pool is not among them."""
        prompts = self._of("train/tokens") - self._of("train/response_tokens")
        means, spreads = (
            self._of("train/mean_response_tokens"),
            self._of("train/std_response_tokens"),
        )
        mean = float(means.mean())
        std = float(np.sqrt(max((spreads**2 + means**2).mean() - mean**2, 0.0)))
        lengths = lengths_of(mean, std, self._config.rollout.max_tokens)
        held = [end - start for start, end in self._evaluations]
        return PlanConfig.model_validate(
            {
                "prompt_tokens": _rounded(prompts.mean() / self._config.train.batch_size),
                "response_tokens": _rounded(lengths.mean),
                "response_sigma": _rounded(lengths.sigma),
                "rollout": self._rollout(mean),
                "teachers": {name: self._teacher(name) for name in self._config.teachers},
                "train": self._train(),
                "evaluation_s": _rounded(float(np.mean(held)) if held else 0.0),
                "outside_s": _rounded(max((self._wall_s or 0.0) - self._all_s, 0.0)),
            }
        )

    def calibrated(self, setting: Setting) -> Setting:
        """The setting with turnarounds that give the measured requests and batch sizes."""
        requests, _ = self._requests()
        batches = {
            name: float(self._sum(f"teacher/{name}/samples") / self._sum(f"teacher/{name}/batches"))
            for name in self._config.teachers
        }
        return calibrate(setting, float(requests.sum() / self._generating().sum()), batches)

    # ── fits ───────────────────────────────────────────────────────────────────────────────────

    def _rollout(self, length: float) -> dict[str, float]:
        """Seconds of an engine step by its running requests, from each training step's requests.

        A request of L tokens that took D seconds ran for L engine steps, after half a step on
        average until it joined the others; requests beyond the engine's slots waited. Steps with an
        evaluation are not counted.
        """
        requests, rollouts = self._requests()
        generating = self._generating()
        kept = (rollouts > 0) & (generating > 0)
        undisturbed = kept & ~self._evaluated()
        if undisturbed.sum() >= MIN_STEPS:
            kept = undisturbed
        rollouts, requests = rollouts[kept], requests[kept]
        in_flight = requests / generating[kept]
        running = np.minimum(in_flight, slots_of(self._config))
        step_s = requests / (rollouts * (length + 0.5)) * (running / in_flight)
        fixed, slope = fixed_and_slope(running, step_s, rollouts)
        return {"step_s": _rounded(fixed), "step_s_per_request": _rounded(slope)}

    def _teacher(self, name: str) -> dict[str, float]:
        pool = f"teacher/{name}"
        batches = self._of(f"{pool}/batches_per_s") * self._covered
        tokens = self._of(f"{pool}/tokens_per_s") * self._covered
        overhead, rate = batches_and_tokens(self._of(f"{pool}/busy_s"), batches, tokens)
        samples = {other: self._sum(f"teacher/{other}/samples") for other in self._config.teachers}
        share = samples[name] / sum(samples.values())
        return {
            "tokens_per_s": _rounded(rate),
            "overhead_s": _rounded(overhead),
            "share": _rounded(share, 6),
        }

    def _train(self) -> dict[str, float]:
        computed, tokens = self._of("train/compute_s"), self._of("train/tokens")
        fixed, slope = fixed_and_slope(tokens, computed, np.ones_like(tokens))
        busy_s = float(self._of("train/busy_s").sum())
        scale = busy_s / float(computed.sum())  # a step includes unpacking and the thread's start
        held = self._of("sync/trainer_wait_s")
        idle_s = self._seconds - busy_s - float(self._of("train/wait_s").sum() + held.sum())
        stalls = self._of("sync/stall_mean_s")
        slope = max(slope, computed.mean() / tokens.mean() / 20)
        ranks = 1 + TrainPlan.model_fields["scaling"].default * (self._config.train.ranks - 1)
        return {
            "tokens_per_s": _rounded(1 / (slope * scale * ranks)),
            "overhead_s": _rounded(fixed * scale),
            "turnaround_s": _rounded(max(idle_s, 0.0) / len(self._steps)),
            "snapshot_s": _rounded(float(np.median(held[held > 0])) if held.any() else 0.0),
            "sync_s": _rounded(float(stalls[stalls > 0].mean()) if stalls.any() else 0.0),
        }

    def _sum(self, counter: str) -> float:
        """A counter's sum over the steps."""
        return float((self._of(f"{counter}_per_s") * self._covered).sum())

    def _requests(self) -> tuple[Floats, Floats]:
        """Seconds and number of the requests that ended, by step."""
        return self._of("rollout/request_s"), self._of("rollout/rollouts_per_s") * self._covered

    def _generating(self) -> Floats:
        """Seconds in which replicas worked unpaused, summed over replicas, by step."""
        return np.maximum(self._of("rollout/busy_s") - self._of("rollout/paused_s"), 0.0)

    def _evaluated(self) -> Any:
        ends = np.array([row.time for row in self._steps], dtype=np.float64)
        starts = ends - self._covered
        touched = np.zeros(len(ends), dtype=bool)
        for start, end in self._evaluations:
            touched |= (starts < end) & (ends > start)
        return touched

    def _of(self, key: str) -> Floats:
        """The metric's value at each step; 0 where it was not reported."""
        return np.array([row.values.get(key, 0.0) for row in self._steps], dtype=np.float64)

    def _check(self, run_dir: ForeignPath) -> None:
        where = str(run_dir / "metrics.jsonl")
        if len(self._steps) < MIN_STEPS:
            message = f"has {len(self._steps)} steps after the warm-up, expected {MIN_STEPS}"
            raise ConfigError.of("", message, "let the run make more steps", where)
        reported = sum("rollout/busy_s" in row.values for row in self._steps)
        if 0 < reported < MIN_STEPS:
            message = f"gave the pools' metrics at {reported} steps after the warm-up, expected "
            message += str(MIN_STEPS)
            remedy = "let the run make more steps, or set log.pools_every_s=0 in the next one"
            raise ConfigError.of("log.pools_every_s", message, remedy, where)
        teachers = (
            f"teacher/{name}/{key}" for name in self._config.teachers for key in PER_TEACHER
        )
        missing = [
            key for key in (*NEEDED, *teachers) if not any(key in row.values for row in self._steps)
        ]
        if missing:
            remedy = "an older version made the run: run again, or write a plan section"
            raise ConfigError([Problem(where, key, "was not measured", remedy) for key in missing])


NEEDED = (
    "rollout/request_s",
    "rollout/rollouts_per_s",
    "rollout/busy_s",
    "rollout/paused_s",
    "train/busy_s",
    "train/wait_s",
    "train/compute_s",
    "train/tokens",
    "train/response_tokens",
    "train/std_response_tokens",
)
PER_TEACHER = ("busy_s", "batches_per_s", "tokens_per_s", "samples_per_s")


def _rows(file: ForeignPath) -> list[MetricsRow]:
    """The rows of a file of metrics; lines torn by a kill are left out."""
    try:
        return [row for _, row in metrics_rows(file, HELD_BYTES) if row is not None]
    except OSError as error:
        remedy = "give the directory of a run"
        raise ConfigError.of("", f"cannot be read: {error}", remedy, str(file)) from None


def _wall_s(file: ForeignPath) -> float | None:
    """Seconds of the whole run; None if it has not ended."""
    try:
        return number_of(json.loads(file.read())["seconds"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _rounded(value: float, digits: int = 4) -> float:
    """Rounds to significant digits; further digits are noise."""
    return float(f"{float(value):.{digits}g}")


Floats = NDArray[np.float64]

SPREAD = 0.05
"""Below this coefficient of variation a fixed and a proportional part cannot be separated."""


def fixed_and_slope(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """y ≈ fixed + slope · x, both at least 0, by weighted least squares through the mean point.

    A part that would be negative is 0, and the other part keeps the mean. If x varies less than
    ``SPREAD``, fixed is 0.
    """
    total = weights.sum()
    mean_x, mean_y = float((weights * x).sum() / total), float((weights * y).sum() / total)
    deviation = x - mean_x
    variance = float((weights * deviation**2).sum() / total)
    if mean_x == 0:
        return mean_y, 0.0
    if math.sqrt(variance) < SPREAD * mean_x:
        return 0.0, mean_y / mean_x
    slope = float((weights * deviation * (y - mean_y)).sum() / total) / variance
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return max(mean_y - slope * mean_x, 0.0), slope


def batches_and_tokens(seconds: Floats, batches: Floats, tokens: Floats) -> tuple[float, float]:
    """(overhead of a batch, tokens per second): seconds ≈ overhead · batches + tokens / rate.

    Both sides are divided by the tokens, which weight the intervals; the fixed part of
    ``fixed_and_slope`` is then 1 / rate.
    """
    kept = tokens > 0
    seconds, batches, tokens = seconds[kept], batches[kept], tokens[kept]
    fixed, overhead = fixed_and_slope(batches / tokens, seconds / tokens, tokens)
    least = seconds.sum() / tokens.sum() / 20  # at most 20 times the speed with its overhead
    if fixed < least:
        fixed = least
        overhead = max((seconds.sum() - fixed * tokens.sum()) / batches.sum(), 0.0)
    return overhead, 1 / fixed


def lengths_of(mean: float, std: float, most: int) -> Lengths:
    """The log-normal lengths, cut at ``most``, that have this mean and standard deviation.

    Inner search: the mean of the uncut distribution for a given sigma; outer search: sigma.
    """
    if std < 1e-3 * mean or mean >= most:
        return Lengths(min(mean, most), 0.0, most)
    sigma = _crossing(0.0, 4.0, lambda sigma: _cut_std(_with_mean(mean, sigma, most)) < std)
    return _with_mean(mean, sigma, most)


def _with_mean(mean: float, sigma: float, most: int) -> Lengths:
    def lengths(log_factor: float) -> Lengths:
        return Lengths(mean * math.exp(log_factor), sigma, most)

    return lengths(_crossing(0.0, math.log(1e4), lambda log: mean_length(lengths(log)) < mean))


def _crossing(low: float, high: float, too_low: Callable[[float], bool]) -> float:
    """The value between ``low`` and ``high`` at which ``too_low`` becomes false."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return (low + high) / 2


def _cut_std(lengths: Lengths) -> float:
    """E[min(X, c)²] is m²·e^(σ²)·Φ(d - 2σ) + c²·(1 - Φ(d)), with d as in ``mean_length``."""
    sigma, most = lengths.sigma, lengths.most
    d = (math.log(most) - math.log(lengths.mean)) / sigma + sigma / 2
    square = math.exp(2 * math.log(lengths.mean) + sigma**2) * phi(d - 2 * sigma)
    square += most**2 * (1 - phi(d))
    return math.sqrt(max(square - mean_length(lengths) ** 2, 0.0))
