"""Reports of pools: asked of the stages, and merged from those of several replicas."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from async_opd.core.reports import StageReport
from async_opd.core.stages import Stages, TopicStats
from async_opd.files.lines import MetricsRow

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
