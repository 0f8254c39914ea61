"""From reports to metrics."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.core.reports import Interval, StageReport, StepReport
from async_opd.core.samples import Header
from async_opd.core.stages import TopicStats
from async_opd.core.uid import is_traced
from async_opd.files.lines import MetricsRow
from async_opd.observability.metering import Metering, between_reports, merge_reports


def metered(start: float, now: float, **pools: tuple[float, float]) -> dict[str, float]:
    times = iter([start, start, now])
    metering = Metering(clock=lambda: next(times))
    metering.start()
    reports = {
        name.replace("__", "/"): StageReport(
            counters={"tokens": 10.0}, busy=(Interval(name, *busy),)
        )
        for name, busy in pools.items()
    }
    headers = (Header("a/0", 1, 1, 0, "t"), Header("b/0", 1, 1, 0, "t"))
    step = StepReport(1, headers, (0, 2), {"loss/total": 1.0})
    return metering.step(step, reports, {"scored": TopicStats(1, 2, 3, 4, 5, 6, 7, 8, 9)})


@pytest.mark.parametrize(
    ("pools", "overlap"),
    [
        ({"rollout": (0, 6), "teacher__a": (2, 7), "train": (4, 9)}, 0.2),
        ({"rollout": (0, 9), "teacher__a": (0, 3), "teacher__b": (5, 6), "train": (0, 9)}, 0.4),
    ],
    ids=["all three stages", "any teacher"],
)
def test_overlap_is_the_share_of_time_in_which_all_stages_computed(
    pools: dict[str, tuple[float, float]], overlap: float
) -> None:
    assert metered(0, 10, **pools)["perf/overlap"] == pytest.approx(overlap)


def test_a_step_has_rates_staleness_and_every_count_of_a_topic() -> None:
    metrics = metered(5, 10, train=(5, 6))
    assert metrics["train/tokens_per_s"] == pytest.approx(2.0)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)
    assert metrics["queue/scored/leased"] == 2.0


def test_busy_seconds_of_replicas_side_by_side_add_up() -> None:
    times = iter([0.0, 0.0, 10.0])
    metering = Metering(clock=lambda: next(times))
    metering.start()
    pool = StageReport(busy=(Interval("x", 0, 4), Interval("x", 2, 6)))
    metrics = metering.step(StepReport(1, (), (), {}), {"rollout": pool}, {})
    assert (metrics["rollout/busy_s"], metrics["rollout/busy"]) == (8.0, 0.6)


def stepped(metering: Metering, gap: float) -> dict[str, float]:
    return metering.step(StepReport(1, (), (), {"teacher/a/gap": gap}), {}, {})


def test_a_teachers_gap_is_compared_with_that_of_the_first_step_of_all_lives() -> None:
    metering = Metering()
    assert stepped(metering, 0.8)["teacher/a/gap_closed"] == 0
    found = stepped(metering, 0.2)
    assert found["teacher/a/gap_closed"] == pytest.approx(0.75)
    assert found["teacher/a/initial_gap"] == 0.8
    resumed = Metering(before={"teacher/a/initial_gap": 0.8, "teacher/a/gap": 0.4})
    assert stepped(resumed, 0.2)["teacher/a/gap_closed"] == pytest.approx(0.75)
    assert "teacher/a/gap_closed" not in stepped(Metering(), 0.0)  # it agreed from the start


class AskedStages:
    """Stages of which only the number of reports is known."""

    def __init__(self) -> None:
        self.asked = 0
        self.rollouter = self.scorer = self.trainer = self.queue = self

    async def report(self) -> Any:
        self.asked += 1
        return {}

    async def stats(self) -> dict[str, TopicStats]:
        return {}


async def asked_at(*times: float, every_s: float, last: float = -1.0) -> list[float]:
    """The times at which the pools are asked, with a step at each of these times."""
    now, found = 0.0, []
    metering = Metering(every_s, clock=lambda: now)
    metering.start()
    for now in times:
        stages: Any = AskedStages()
        pools, topics = await metering.pools(stages, now == last)
        metering.step(StepReport(1, (), (), {}), {name: StageReport() for name in pools}, topics)
        found += [now] * bool(stages.asked)
    return found


@pytest.mark.parametrize(
    ("times", "every_s", "last", "asked"),
    [
        ((2.0, 2.5, 3.9, 4.0, 9.0, 10.0), 2.0, -1.0, [2.0, 4.0, 9.0]),
        ((0.5, 1.0), 2.0, -1.0, [0.5]),
        ((0.5, 1.0, 1.1), 2.0, 1.1, [0.5, 1.1]),
        ((1.0, 1.1, 1.2), 0.0, -1.0, [1.0, 1.1, 1.2]),
    ],
    ids=["old enough", "the first step", "the last step", "an interval of zero"],
)
async def test_pools_are_asked_with_a_step_once_their_last_reports_are_old_enough(
    times: tuple[float, ...], every_s: float, last: float, asked: list[float]
) -> None:
    assert await asked_at(*times, every_s=every_s, last=last) == asked


def test_rates_are_over_all_steps_since_the_reports_before() -> None:
    times = iter([0.0, 0.0, 3.0, 4.0])
    metering = Metering(2.0, clock=lambda: next(times))
    metering.start()
    metering.step(StepReport(1, (), (), {}), {}, {})
    pool = StageReport(counters={"tokens": 8.0}, busy=(Interval("x", 1, 3),))
    metrics = metering.step(StepReport(2, (), (), {}), {"train": pool}, {})
    shown = [metrics[key] for key in ("perf/step_s", "perf/pools_s", "train/tokens_per_s")]
    assert [*shown, metrics["train/busy"]] == [1.0, 4.0, 2.0, 0.5]


def test_a_step_without_reports_has_no_metrics_of_pools() -> None:
    metrics = Metering().step(StepReport(1, (), (), {}), {}, {})
    assert not {"perf/pools_s", "perf/overlap"} & metrics.keys()


def test_the_trace_gets_samples_of_steps_without_reports_with_the_next_reports() -> None:
    metering, uid = Metering(), next(name for name in map(str, range(999)) if is_traced(name))
    steps = [
        StepReport(n, (Header(uid, 1, 1, 0, "t"),), (0,), {}, computed=Interval("step", n, n + 1))
        for n in (1, 2)
    ]
    assert metering.traced(steps[0], {}) == {}
    found = metering.traced(steps[1], {"train": StageReport(busy=(Interval("step", 1, 3),))})
    assert [(one.start, one.sample) for one in found["train"]] == [(1, ""), (1, uid), (2, uid)]


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
