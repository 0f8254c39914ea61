"""Key figures of a run: duration, samples, tokens, GPU hours and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from async_opd.checks.resources import pools
from async_opd.config.run_config import RunConfig
from async_opd.files.lines import MetricsRow
from async_opd.files.origin import read_origins
from async_opd.memory.pools import EVAL
from async_opd.observability.terminal import duration
from async_opd.tools.report.pool_times import mean, steady_rows, total
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.verdict import samples_per_s
from async_opd.tools.report.wall_time import START_UP, WallTime, phases


@dataclass(frozen=True)
class Facts:
    """``tokens`` are trained response tokens; ``seconds`` is the wall time of the run's parts.

    In ``start_up_s`` of them engines and trainer started.
    """

    steps: int
    seconds: float
    samples: int
    tokens: float
    samples_per_s: float
    staleness: float
    gpus: float
    dead_letters: int
    start_up_s: float = 0.0

    @property
    def gpu_hours(self) -> float:
        """GPUs times hours, the start of the engines included; 0 on CPUs."""
        return self.gpus * self.seconds / 3600

    def cost_of_million(self, price: float | None) -> float | None:
        """Price of the GPU hours over millions of trained response tokens; None if unknown."""
        if price is None or not self.gpus or not self.tokens:
            return None
        return price * self.gpu_hours / (self.tokens / 1e6)


def facts_of(run: RecordedRun) -> Facts:
    """The figures of a run, whether it is over or not."""
    rows, wall = steady_rows(run), WallTime.of(run)
    return Facts(
        steps=run.steps[-1].step if run.steps else 0,
        seconds=elapsed(run),
        start_up_s=sum(one.seconds for one in phases(run, wall) if one.name == START_UP),
        samples=run.config.train.batch_size * len(run.steps),
        tokens=total(run.steps, "train/response_tokens"),
        samples_per_s=samples_per_s(run, rows) if rows else 0.0,
        staleness=mean(rows, "staleness/mean"),
        gpus=gpus_of(run.config, run.steps) if device_of(run) != "cpu" else 0,
        dead_letters=len(run.dead_letters),
    )


def device_of(run: RecordedRun) -> str:
    """The device that the newest part of the run found; else that of the config."""
    found = [origin.device for origin in read_origins(run.folder) if origin.device]
    return found[-1] if found else run.config.cluster.device


def gpus_of(config: RunConfig, rows: Sequence[MetricsRow] = ()) -> float:
    """GPUs that the pools take; those of colocated pools count once.

    A pool that can grow takes those of the mean number of replicas that served, at least ``min``.
    """
    keys = {"rollout": "rollout/replicas", EVAL: "rollout/eval_replicas"}
    keys |= {f"teachers.{name}": f"teacher/{name}/serving" for name in config.teachers}
    return sum(
        max(pool.replicas, mean(rows, keys[pool.name]) if pool.beyond else 0)
        * pool.gpus_per_replica
        for pool in pools(config)
        if pool.shares is None
    )


def tiles_of(run: RecordedRun) -> list[tuple[str, str]]:
    """(name, value) of the figures that the report begins with."""
    facts, price = facts_of(run), run.config.report.gpu_hour_price
    found = [
        ("steps", f"{facts.steps:,} of {run.config.train.steps:,}"),
        ("wall time", duration(facts.seconds)),
        ("of it start-up", duration(facts.start_up_s)),
        ("samples trained", f"{facts.samples:,}"),
        ("tokens trained", _short(facts.tokens)),
        ("samples/s", f"{facts.samples_per_s:.3g}"),
        ("mean staleness", f"{facts.staleness:.2f}"),
        ("dead letters", f"{facts.dead_letters:,}"),
    ]
    if facts.gpus:
        found.append(("GPU hours", f"{facts.gpu_hours:.3g}"))
    if (cost := facts.cost_of_million(price)) is not None:
        found.append(("cost per million tokens", f"{cost:.3g}"))
    return found


def elapsed(run: RecordedRun, until: float = math.inf) -> float:
    """Seconds of the run's parts up to a time, since the epoch."""
    wall = WallTime.of(run)
    return wall.at(until) if wall.parts else run.summary.seconds if run.summary else 0.0


def _short(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
