"""Reports of replicas as that of their pool."""

from __future__ import annotations

from async_opd.core.reports import StageReport
from async_opd.observability.pool_report import merge_reports


def test_a_pool_waits_only_if_every_replica_does() -> None:
    busy = StageReport(waits_for="")
    assert merge_reports([StageReport(waits_for="prompts"), busy]).waits_for == ""


def test_a_pool_has_the_version_of_its_oldest_replica() -> None:
    reports = [StageReport(gauges={"version": 4.0}), StageReport(gauges={"version": 3.0})]
    assert merge_reports(reports).gauges["version"] == 3.0
