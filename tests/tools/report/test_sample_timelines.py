"""Timelines of traced samples: parts that add up, pauses cut out, and what is left out."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.reports import Interval
from async_opd.core.uid import is_traced
from async_opd.observability.sinks import Summary
from async_opd.observability.trace import TRACE, TraceSink
from async_opd.tools.report.charts import Chart
from async_opd.tools.report.recorded_run import RecordedRun, read_recorded_run
from async_opd.tools.report.run_charts import sample_timelines
from async_opd.tools.report.sample_timelines import PAUSED, SAMPLED, SampleTimeline, read_timelines
from tests.tools.report.simulated import record
from tests.tools.report.test_verdict import balanced

START = 1_000_000.0
UIDS = [uid for uid in map(str, range(2000)) if is_traced(uid)]
MOMENTS = (0.0, 2.0, 7.0, 8.0, 9.5, 10.0, 10.25, 12.0, 13.0, 13.5)
"""Admission, sampled from and to, graded, taken, scored from and to, taken, trained from and to."""


def one(what: str, start: float, end: float, track: str = "", uid: str = "") -> Interval:
    return Interval(what, START + start, START + end, track, uid)


def reports(uid: str, at: tuple[float, ...] = MOMENTS) -> list[dict[str, list[Interval]]]:
    """The stages' reports of a sample: its admission; then its work until its step."""
    sampled, scored, trained = (at[1], at[2]), (at[5], at[6]), (at[8], at[9])
    return [
        {"admission": [one("admit", at[0], at[0], "", uid)]},
        {
            "rollout": [
                one("generate", *sampled, "student/0"),
                one("generate", *sampled, "student/0", uid),
                one("grade", at[2], at[3], "student/0", uid),
            ],
            "teacher/a": [
                one("lease", at[4], at[4], "", uid),
                one("score", *scored, "a/0"),
                one("score", *scored, "a/0", uid),
            ],
            "train": [
                one("step", *trained, "trainer/0"),
                one("lease", at[7], at[7], "", uid),
                one("step", *trained, "trainer/0", uid),
            ],
        },
    ]


def write(folder: Path, *written: dict[str, list[Interval]]) -> Path:
    """The trace of these reports."""
    sink = TraceSink(folder, clock=lambda: START)
    sink.start()
    for report in written:
        sink.busy(report)
    sink.close(Summary("completed", None, 1, 1.0, folder))
    return folder / TRACE


def seconds(life: SampleTimeline) -> list[tuple[str, float]]:
    return [(name, (end - start) / 1e6) for name, start, end in life.parts]


def test_the_parts_of_a_life_are_those_between_its_moments(tmp_path: Path) -> None:
    (life,) = read_timelines(write(tmp_path, *reports(UIDS[0])))
    assert life.uid == UIDS[0]
    assert seconds(life) == [
        ("waits for a slot", 2.0),
        (SAMPLED, 5.0),
        ("is graded", 1.0),
        ("in a teacher's queue", 1.5),
        ("waits for a teacher", 0.5),
        ("is scored", 0.25),
        ("in the trainer's queue", 1.75),
        ("waits for the trainer", 1.0),
        ("is trained", 0.5),
    ]
    assert life.whole == 13_500_000
    assert list(read_timelines(tmp_path / "none" / TRACE)) == []
    assert list(sample_timelines([])) == []


def test_without_a_grader_there_is_no_grading_and_a_life_may_begin_anew(tmp_path: Path) -> None:
    admission, rest = reports(UIDS[0], tuple(moment + 20 for moment in MOMENTS))
    rest["rollout"] = [found for found in rest["rollout"] if found.what != "grade"]
    (life,) = read_timelines(write(tmp_path, reports(UIDS[0])[0], admission, rest))
    assert life.whole == 13_500_000
    assert ("is graded", 1.0) not in seconds(life)
    assert ("in a teacher's queue", 2.5) in seconds(life)


def test_a_pause_of_its_replica_is_cut_out_of_a_samples_sampling(tmp_path: Path) -> None:
    pauses = [(0.0, 1.0), (1.5, 2.5), (4.0, 5.0), (6.5, 8.0), (20.0, 21.0)]
    syncs = [one("sync", start, end, "student/0 sync") for start, end in pauses]
    other = one("sync", 3.0, 4.0, "student/1 sync")
    admission, rest = reports(UIDS[0])
    rest["rollout"] += [*syncs, other]
    (life,) = read_timelines(write(tmp_path, admission, rest))
    assert seconds(life)[1:6] == [
        (PAUSED, 0.5),
        (SAMPLED, 1.5),
        (PAUSED, 1.0),
        (SAMPLED, 1.5),
        (PAUSED, 0.5),
    ]
    assert (life.total(SAMPLED), life.total(PAUSED)) == (3_000_000, 2_000_000)
    assert life.whole == 13_500_000


@given(
    st.lists(st.integers(0, 40), min_size=10, max_size=10),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=6),
)
def test_the_parts_add_up_to_the_whole_whatever_the_clocks_of_several_machines_say(
    moments: list[int], syncs: list[tuple[int, int]]
) -> None:
    at = [float(moment) for moment in moments]
    at[9] = max(at) + 1  # what ends after the step is another copy's
    for start, end in ((1, 2), (5, 6)):
        at[start], at[end] = sorted((at[start], at[end]))
    admission, rest = reports(UIDS[0], tuple(at))
    now = 0.0
    for wait, length in syncs:
        rest["rollout"].append(one("sync", now + wait, now + wait + length, "student/0 sync"))
        now += wait + length
    with tempfile.TemporaryDirectory() as folder:
        (life,) = read_timelines(write(Path(folder), admission, rest))
    assert life.parts[0][1] == 0
    assert all(a[2] == b[1] for a, b in pairwise(life.parts))
    assert all(end > start for _, start, end in life.parts)
    assert sum(end - start for _, start, end in life.parts) == life.whole
    assert life.whole == round((at[9] - at[0]) * 1e6)


@pytest.mark.parametrize("lost", ["admit", "lease", "score", "generate"])
def test_a_life_without_one_of_its_moments_is_left_out(lost: str, tmp_path: Path) -> None:
    def without(report: dict[str, list[Interval]]) -> dict[str, list[Interval]]:
        return {
            pool: [i for i in found if not (i.sample == UIDS[0] and i.what == lost)]
            for pool, found in report.items()
        }

    written = [*map(without, reports(UIDS[0])), *reports(UIDS[1])]
    assert [life.uid for life in read_timelines(write(tmp_path, *written))] == [UIDS[1]]


def test_a_damaged_event_costs_one_life_and_no_other(tmp_path: Path) -> None:
    path = write(tmp_path, *reports(UIDS[0]), *reports(UIDS[1]), *reports(UIDS[2]))
    lines = path.read_text().split("\n")
    found = [at for at, line in enumerate(lines) if '"life"' in line]
    event = json.loads(lines[found[0]].rstrip(","))
    event["args"]["life"][0][3] = 10**400
    lines[found[0]] = json.dumps(event) + ","
    lines[found[1]] = lines[found[1]][:60]
    path.write_text("\n".join(lines))
    assert [life.uid for life in read_timelines(path)] == [UIDS[2]]


def charts(count: int) -> list[Chart]:
    lives = [
        SampleTimeline(str(at), ((SAMPLED, 0, at), ("is scored", at, 4 * at)))
        for at in range(1, count)
    ]
    return list(sample_timelines(lives))


def test_the_mean_shares_of_all_parts_add_up_to_one() -> None:
    mean, _ = charts(40)
    values = mean.spec["data"]["values"]
    assert [(one["w"], one["a"], one["b"]) for one in values] == [
        (SAMPLED, 0.0, 0.25),
        ("is scored", 0.25, 1.0),
    ]
    assert [row[3] for row in mean.rows] == ["25.0%", "75.0%"]


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (2, ["slowest"]),
        (3, ["second slowest", "slowest"]),
        (41, ["fastest", "median", "third slowest", "second slowest", "slowest"]),
    ],
)
def test_single_samples_are_fastest_median_and_slowest(count: int, named: list[str]) -> None:
    _, single = charts(count)
    assert list(dict.fromkeys(row[0] for row in single.rows)) == named
    assert single.rows[-1][1] == str(count - 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    folder, one = tmp_path_factory.mktemp("runs") / "graded", balanced(2, 8, 16)
    one = replace(one, rollout=replace(one.rollout, n=4))
    return read_recorded_run(record(folder, one, grader=(3.0, 2)))


def test_the_real_pipeline_leaves_whole_lives_of_trained_samples(run: RecordedRun) -> None:
    trained = {uid for uid in run.audit().trained if is_traced(uid)}
    assert len(trained) >= 3
    assert {life.uid for life in run.timelines} == trained
    for life in run.timelines:
        assert life.total("is graded") >= 3_000_000
        assert min(map(life.total, (SAMPLED, "is scored", "is trained"))) > 0
