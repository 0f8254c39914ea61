"""Reports of replicas as that of their pool."""

from __future__ import annotations

import pytest

from async_opd.core.reports import StageReport
from async_opd.files.lines import MetricsRow
from async_opd.observability.metering import between_reports, merge_reports


def test_a_pool_has_the_version_of_its_oldest_replica_and_waits_only_if_all_do() -> None:
    merged = merge_reports(
        [
            StageReport(gauges={"version": 4.0}, waits_for="prompts"),
            StageReport(gauges={"version": 3.0}, waits_for=""),
        ]
    )
    assert (merged.gauges["version"], merged.waits_for) == (3.0, "")


def rows_of(*reported: bool) -> list[MetricsRow]:
    """One row a step, some of them with reports of pools."""
    return [
        MetricsRow(step, 0.0, {"perf/pools_s": 1.0} if has else {})
        for step, has in enumerate(reported)
    ]


@pytest.mark.parametrize(
    ("start", "end", "kept"),
    [(0, 6, [0, 1, 2, 3, 4]), (1, 6, [3, 4]), (3, 5, [3, 4]), (1, 4, [1, 2, 3]), (5, 6, [5])],
)
def test_steps_between_two_reports_are_those_that_the_reports_are_about(
    start: int, end: int, kept: list[int]
) -> None:
    rows = rows_of(False, False, True, False, True, False)
    assert [row.step for row in between_reports(rows, start, end)] == kept
