"""The wall time of runs of several parts, and its phases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.files.origin import add_origin
from async_opd.tools.report.facts import tiles_of
from async_opd.tools.report.recorded_run import RecordedRun, read_recorded_run
from async_opd.tools.report.run_charts import metric_charts, pool_charts, wall_time
from async_opd.tools.report.wall_time import WallTime, phases
from tests.tools.plan.runs import write_run

BEGUN = datetime(2026, 11, 22, 10, tzinfo=UTC).timestamp()
PART = "starting Ray and the engines", "everything is up after 60 s", "completed"
POOLS = {"rollout/request_s": 0.0, "teacher/sort/busy_s": 0.0, "train/busy_s": 0.0}


def written(
    folder: Path,
    parts: Sequence[float],
    steps: Sequence[tuple[float, float, bool]],
    lines: Sequence[str] = PART,
) -> RecordedRun:
    """Parts that begin after ``parts`` seconds, serve 60 s later, and end 40 s after that.

    ``steps`` have the second of their end, their duration, and whether they report the pools.
    """
    write_run(folder, steps=0)
    for name in ("summary.json", "origin.json"):
        (folder / name).unlink(missing_ok=True)
    log = ""
    for part in parts:
        add_origin(folder, ["run", "c.yaml"], clock=lambda part=part: BEGUN + part)
        for after, line in zip((0, 60, 100), lines, strict=True):
            log += f"{datetime.fromtimestamp(BEGUN + part + after, UTC).isoformat()} {line}\n"
    (folder / "run.log").write_text(log)
    rows = [
        {"step": step, "time": BEGUN + at, "perf/step_s": took, "perf/samples_per_s": 1 / took}
        | ({"perf/pools_s": took, **POOLS} if reported else {})
        for step, (at, took, reported) in enumerate(steps, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_recorded_run(folder)


def test_the_wall_time_is_divided_into_start_up_steps_and_the_rest(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [0], [(75, 10, True), (90, 15, True)])
    found = [(one.name, one.begin, one.end) for one in phases(run, WallTime.of(run))]
    assert found == [
        ("start-up", 0, 60),
        ("before the first step", 60, 65),
        ("steps", 65, 90),
        ("end", 90, 100),
    ]
    assert ("of it start-up", "0:01:00") in tiles_of(run)
    (chart,) = wall_time(run)
    assert "takes 0:01:00 of 0:01:40 (60%)" in chart.note
    assert [row[1:3] for row in chart.rows][:2] == [
        ("start-up", "0"),
        ("before the first step", "60"),
    ]


def test_each_part_of_a_resumed_run_has_its_start_up(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [0, 5000], [(80, 10, True), (5090, 10, True)])
    wall = WallTime.of(run)
    starts = [(one.part, one.begin, one.end) for one in phases(run, wall) if one.name == "start-up"]
    assert starts == [(1, 0, 60), (2, 100, 160)]
    assert wall.seconds == 200
    assert ("of it start-up", "0:02:00") in tiles_of(run)
    (chart,) = wall_time(run)
    assert {row[0] for row in chart.rows} == {"part 1", "part 2"}


def test_without_the_message_of_the_engines_start_up_ends_before_the_first_step(
    tmp_path: Path,
) -> None:
    run = written(tmp_path / "run", [0], [(90, 10, True)], ["starting", "warned", "completed"])
    first = next(phases(run, WallTime.of(run)))
    assert (first.name, first.end) == ("start-up", 80)


def test_a_part_without_a_step_is_start_up_and_what_followed(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [0], [])
    found = [(one.name, one.end) for one in phases(run, WallTime.of(run))]
    assert found == [("start-up", 60), ("before the first step", 100)]


def test_steps_of_a_tenth_of_a_second_are_as_narrow_as_they_are_short(tmp_path: Path) -> None:
    """Reports of the pools come every few seconds only: steps between them have none."""
    quick = [(65 + at / 10, 0.1, False) for at in range(1, 11)]
    run = written(tmp_path / "run", [0], [(65, 5, True), *quick, (96, 30, True)])
    chart = next(iter(pool_charts(run)))
    spans = {(one["x"], one["x2"]) for one in chart.spec["data"]["values"]}
    assert {(round(a), round(b)) for a, b in spans} == {(60, 65), (65, 96)}


def test_the_throughput_is_drawn_over_the_time_of_the_run(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [0, 5000], [(80, 10, True), (5090, 10, True)])
    (chart,) = metric_charts(run, "pools")
    assert [one["x"] for one in chart.spec["data"]["values"]] == pytest.approx([80 / 60, 190 / 60])
    assert chart.spec["encoding"]["x"]["title"] == "time of the run (min)"


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=6),
    st.lists(st.floats(-10, 2e5), min_size=2, max_size=9),
)
def test_time_of_the_run_never_goes_back_and_ends_with_it(
    lengths: list[tuple[float, float]], moments: list[float]
) -> None:
    parts, at = list[tuple[float, float]](), 0.0
    for pause, length in lengths:
        parts.append((at + pause, at + pause + length))
        at += pause + length
    wall = WallTime(tuple(parts))
    found = [wall.at(moment) for moment in sorted(moments)]
    assert found == sorted(found)
    assert wall.at(1e9) == pytest.approx(wall.seconds)
    assert wall.seconds == pytest.approx(sum(length for _, length in lengths))
