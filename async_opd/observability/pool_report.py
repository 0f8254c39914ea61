"""Merges the reports of several replicas into the report of their pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from async_opd.core.reports import StageReport


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


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for key, value in part.items():
            sums[key] += value
    return dict(sums)
