"""Reports of several replicas as the report of their pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from async_opd.core.stages import StageReport


def merge_reports(reports: Iterable[StageReport]) -> StageReport:
    """Counters and gauges summed (``version``: the oldest), busy intervals side by side.

    The pool waits only if every replica does.
    """
    reports = list(reports)
    counters: defaultdict[str, float] = defaultdict(float)
    gauges: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for key, value in report.counters.items():
            counters[key] += value
        for key, value in report.gauges.items():
            gauges[key] += value
    merged = dict(gauges)
    if "version" in merged:
        merged["version"] = min(report.gauges["version"] for report in reports)
    waiting = [report.waits_for for report in reports]
    return StageReport(
        counters=dict(counters),
        gauges=merged,
        busy=tuple(interval for report in reports for interval in report.busy),
        waits_for=waiting[0] if waiting and all(waiting) else "",
    )
