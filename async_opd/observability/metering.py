"""Turns the stages' reports into metrics: rates, busy shares, overlap, staleness.

Pools report when their stages are asked; the reports of several replicas are merged into one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from async_opd.core.reports import Interval, StageReport, StepReport, SyncReport
from async_opd.core.stages import Stages, TopicStats
from async_opd.files.lines import MetricsRow
from async_opd.observability.activity import covered, overlap_s, trained_samples

POOLS_S = "perf/pools_s"
"""Seconds that a row's metrics of pools are about: since the last row with metrics of pools."""


def merge_reports(reports: Iterable[StageReport]) -> StageReport:
    """Sums counters and gauges (``version``: the oldest) and concatenates intervals.

    The pool waits only if every replica waits.
    """
    reports = list(reports)
    gauges = _sums(report.gauges for report in reports)
    if "version" in gauges:
        gauges["version"] = min(report.gauges["version"] for report in reports)
    waiting = [report.waits_for for report in reports]
    return StageReport(
        counters=_sums(report.counters for report in reports),
        gauges=gauges,
        busy=tuple(interval for report in reports for interval in report.busy),
        waits_for=waiting[0] if waiting and all(waiting) else "",
        spans=tuple(interval for report in reports for interval in report.spans),
    )


async def pool_reports(stages: Stages) -> tuple[dict[str, StageReport], dict[str, TopicStats]]:
    """The report of each pool since the last one, and the queue's topics, asked at once."""
    async with asyncio.TaskGroup() as asked:
        rollout = asked.create_task(stages.rollouter.report())
        teachers = asked.create_task(stages.scorer.report())
        trainer = asked.create_task(stages.trainer.report())
        topics = asked.create_task(stages.queue.stats())
    pools = {"rollout": rollout.result()}
    pools |= {f"teacher/{name}": one for name, one in teachers.result().items()}
    return pools | {"train": trainer.result()}, topics.result()


def between_reports(rows: Sequence[MetricsRow], start: int, end: int) -> Sequence[MetricsRow]:
    """About ``rows[start:end]``, from after a row with reports of pools to another one.

    Figures of pools are then of just these rows' steps: a row with ``perf/pools_s`` is
    about all steps since the row before that has it. ``rows[start:end]`` without two such rows.
    """
    ends = [index + 1 for index, row in enumerate(rows) if POOLS_S in row.values]
    starts = [one for one in (0, *ends) if start <= one < end]
    last = max((one for one in ends if one <= end), default=0)
    return rows[starts[0] : last] if starts and starts[0] < last else rows[start:end]


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for key, value in part.items():
            sums[key] += value
    return dict(sums)


LONG_LAG = 8
"""Samples with this staleness and more are counted together."""
INITIAL = "initial_gap"


class Metering:
    """Keeps the times of the last step and of the pools' last reports, and their overlap so far."""

    def __init__(
        self,
        every_s: float = 0.0,
        clock: Callable[[], float] = time.time,
        before: Mapping[str, float] | None = None,
    ) -> None:
        """``every_s``: see ``log.pools_every_s``.

        ``before`` are the last metrics of the run that is resumed.
        """
        self.waits: dict[str, str] = {}
        self.clock = clock
        self._every_s = every_s
        self._asks = True
        self._trained: list[Interval] = []
        self._started = self._last = self._reported = clock()
        self._sync: dict[str, float] = {}
        self._overlap_s = 0.0
        self._initial = {k: v for k, v in (before or {}).items() if k.endswith(INITIAL)}

    def start(self) -> None:
        """Called when training begins: time before it (evaluation) is not part of any rate."""
        self._started = self._last = self._reported = self.clock()
        self._asks = True
        self._overlap_s = 0.0

    def synced(self, report: SyncReport) -> None:
        """Keeps the last sync's metrics for the next step."""
        self._sync |= report.metrics

    @contextmanager
    def timed(self, metric: str) -> Iterator[None]:
        """Measures the seconds in the block, as a metric of the next step."""
        started = self.clock()
        yield
        self._sync[metric] = self.clock() - started

    async def pools(
        self, stages: Stages, last: bool
    ) -> tuple[Mapping[str, StageReport], Mapping[str, TopicStats]]:
        """The pools' reports and the queue's topics, for ``step``; none before it is time.

        It is with the first step and the ``last``, and ``every_s`` after the reports before.
        """
        if self._asks or last or self.clock() - self._reported >= self._every_s:
            self._asks = False
            return await pool_reports(stages)
        return {}, {}

    def step(
        self, report: StepReport, pools: Mapping[str, StageReport], topics: Mapping[str, TopicStats]
    ) -> dict[str, float]:
        """The metrics of a step. The pools' rates and busy shares are since their last reports."""
        now = self.clock()
        elapsed = max(now - self._last, 1e-9)
        metrics = dict(report.metrics) | self._sync | self._gaps(report.metrics)
        self._sync = {}
        metrics["perf/step_s"] = elapsed
        metrics["perf/samples_per_s"] = len(report.trained) / elapsed
        metrics["staleness/mean"] = sum(report.staleness) / max(len(report.staleness), 1)
        metrics["staleness/requeued"] = float(report.requeued)
        for lag, count in Counter(min(lag, LONG_LAG) for lag in report.staleness).items():
            metrics[f"staleness/lag_{lag}"] = float(count)
        metrics["staleness/max"] = float(max(report.staleness, default=0))
        if pools:
            metrics[POOLS_S] = covered_s = max(now - self._reported, 1e-9)
            for pool, stage in pools.items():
                metrics |= self._pool(pool, stage, covered_s)
            metrics["perf/overlap"] = self._overlap(pools, now)
            self._reported = now
        for topic, stats in topics.items():
            metrics |= {
                f"queue/{topic}/{key}": float(value)
                for key, value in asdict(stats).items()
                if value is not None
            }
        self._last = now
        return metrics

    def traced(
        self, report: StepReport, pools: Mapping[str, StageReport]
    ) -> dict[str, list[Interval]]:
        """Intervals for the trace: of pools, then of the samples trained since the last call.

        Nothing without reports of pools: a sample's way is written when it is trained, and has to
        be known by then.
        """
        self._trained += trained_samples(report)
        if not pools:
            return {}
        found = {pool: [*stage.busy, *stage.spans] for pool, stage in pools.items()}
        found["train"] += self._trained
        self._trained = []
        return found

    def _gaps(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Each teacher's gap in the run's first step with its tokens, and the share closed since.

        1 - gap / initial: 1 where the student has reached the teacher, negative where it is further
        away than at first. There is none for a teacher whose initial gap is not positive.
        """
        found: dict[str, float] = {}
        for key, gap in metrics.items():
            if key.startswith("teacher/") and key.endswith("/gap"):
                pool = key.removesuffix("/gap")
                initial = f"{pool}/{INITIAL}"
                found[initial] = first = self._initial.setdefault(initial, gap)
                if first > 0:
                    found[f"{pool}/gap_closed"] = 1 - gap / first
        return found

    def _overlap(self, pools: Mapping[str, StageReport], now: float) -> float:
        """Share of the time since ``start`` in which rollout, scoring and training all computed.

        Scoring counts when any teacher computes. The share is never overstated: an overlap of
        intervals that arrive with different steps' reports is not counted.
        """
        groups: dict[str, list[Interval]] = defaultdict(list)
        for pool, stage in pools.items():
            groups[pool.split("/")[0]] += [i for i in stage.busy if i.start >= self._started]
        self._overlap_s += overlap_s(list(groups.values()))
        return self._overlap_s / max(now - self._started, 1e-9)

    def _pool(self, pool: str, stage: StageReport, elapsed: float) -> dict[str, float]:
        self.waits[pool] = stage.waits_for
        busy = sum(interval.end - interval.start for interval in covered(list(stage.busy)))
        metrics = {
            f"{pool}/busy": min(busy / elapsed, 1.0),
            f"{pool}/busy_s": sum(interval.end - interval.start for interval in stage.busy),
        }
        metrics |= {f"{pool}/{key}": value for key, value in stage.gauges.items()}
        for key, value in stage.counters.items():
            name = f"{key}_per_s" if not key.endswith("_s") else key
            metrics[f"{pool}/{name}"] = value / elapsed if name != key else value
        return metrics
