"""The trace: which events a pool's intervals become, and that the file is whole at any time."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.reports import Interval
from async_opd.core.uid import TRACED, is_traced
from async_opd.observability import trace as module
from async_opd.observability.sinks import Summary
from async_opd.observability.trace import MAX_PENDING, Lanes, SampleFlows, TraceSink

START = 1_000_000.0
SUMMARY = Summary("completed", None, 1, 1.0, Path("run"))


def interval(
    start: float, end: float, what: str = "work", track: str = "", sample: str = ""
) -> Interval:
    return Interval(what, START + start, START + end, track, sample)


def sink(run_dir: Path, **options: Any) -> TraceSink:
    made = TraceSink(run_dir, clock=lambda: START, **options)
    made.start()
    return made


def written(trace: TraceSink) -> dict[str, Any]:
    """The file after everything that was handed over has been written."""
    trace._writer.close(5)
    content: dict[str, Any] = json.loads(trace.path.read_text())
    return content


def events(trace: TraceSink, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in written(trace)["traceEvents"] if event["ph"] == kind]


def test_intervals_are_complete_events_on_threads_without_overlap(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    for pool in ("rollout", "teacher/sort"):
        trace.busy({pool: [interval(1.5, 2, "generate"), interval(1, 3), interval(2, 4)]})
    found = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events(trace)]
    first, second, third = [e for e in found if e[0] == 1]
    assert (1, second[1], "generate", 1_500_000, 500_000) == second
    assert (third[1], third[3]) == (second[1], 2_000_000)  # the lane is free again
    assert {first[1], second[1]} == {0, 1}
    assert len({pid for pid, *_ in found}) == 2
    names = [event["name"] for event in events(trace, "M")]
    assert names == ["process_name", "process_sort_index", "thread_name", "thread_name"] * 2


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20), max_size=5)
)
def test_no_lane_has_two_intervals_at_a_time_whatever_comes_in_which_report(
    reports: list[list[tuple[int, int]]],
) -> None:
    lanes, seen = Lanes(), dict[int, list[Interval]]()
    for report in reports:
        found = sorted(
            (interval(start, start + length) for start, length in report), key=lambda one: one.start
        )
        for lane, one in lanes.assign(found):
            assert all(other.end <= one.start for other in seen.get(lane, []))
            seen.setdefault(lane, []).append(one)


def test_the_file_is_whole_json_after_every_write(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    assert json.loads(trace.path.read_text())["traceEvents"] == []
    for step in range(1, 4):
        trace._write([{"train": [interval(step, step + 1)]}])
        content = json.loads(trace.path.read_text())
        assert sum(event["ph"] == "X" for event in content["traceEvents"]) == step


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_a_resumed_run_goes_on_in_the_same_trace_no_other(tmp_path: Path, closed: bool) -> None:
    first = sink(tmp_path)
    first.busy({"train": [interval(0, 1)]})
    if closed:
        first.close(SUMMARY)
    else:
        written(first)
    second = TraceSink(tmp_path, clock=lambda: START + 100, resumed=True)
    assert second.start() is None
    second.busy({"rollout": [interval(101, 102)], "train": [interval(102, 103)]})
    found = [(event["cat"], event["pid"], event["ts"]) for event in events(second)]
    assert found == [("train", 1, 0), ("rollout", 2, 101_000_000), ("train", 1, 102_000_000)]
    assert events(sink(tmp_path)) == []


@pytest.mark.parametrize("content", ["", "[1, 2", '{"traceEvents": [\n], "otherData": {"a": 1}}\n'])
def test_a_trace_that_was_torn_begins_anew_and_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    trace = TraceSink(tmp_path, resumed=True)
    assert "begins anew" in (trace.start() or "")
    assert events(trace) == []


def test_a_file_does_not_grow_beyond_its_bytes_and_counts_what_is_left_out(tmp_path: Path) -> None:
    trace, each = sink(tmp_path, max_bytes=2000), 40
    for step in range(each):
        trace.busy({"train": [interval(step, step + 1)]})
    left = written(trace)["otherData"]["left_out"]
    assert 0 < left < each
    assert len(events(trace)) + left == each
    assert trace.path.stat().st_size < 2000 + 500
    assert len(events(trace, "i")) == 1
    assert trace.close(SUMMARY) == (
        f"trace.json has {each - left} intervals; {left} events were dropped"
    )


def test_a_resumed_run_keeps_to_the_bytes_of_the_whole_trace(tmp_path: Path) -> None:
    first = sink(tmp_path, max_bytes=1500)
    first.busy({"train": [interval(step, step + 1) for step in range(40)]})
    first.close(SUMMARY)
    size = first.path.stat().st_size
    second = sink(tmp_path, max_bytes=1500, resumed=True)
    second.busy({"train": [interval(step, step + 1) for step in range(40, 60)]})
    assert written(second)["otherData"]["left_out"] > 20
    assert second.path.stat().st_size < size + 10


UID = next(uid for uid in map(str, range(10_000)) if is_traced(uid))


def way(uid: str = UID, start: float = 0.0) -> list[dict[str, list[Interval]]]:
    """Two reports: the sample is generated and scored; then it is trained."""
    parts = [
        ("rollout", interval(start, start + 1, "generate", "student/0")),
        ("teacher/a", interval(start + 1, start + 2, "score", "teacher a/1")),
        ("train", interval(start + 3, start + 4, "step", "trainer/0")),
    ]
    reports = [
        {pool: [one, Interval(one.what, one.start, one.end, one.track, uid)]} for pool, one in parts
    ]
    return [{**reports[0], **reports[1]}, reports[2]]


def test_each_replica_and_rank_has_a_track_of_its_own(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    trace.busy(
        {
            "rollout": [interval(0, 2, "generate", f"student/{replica}") for replica in range(3)],
            "train": [interval(0, 2, "step", f"trainer/{rank}") for rank in range(2)],
        }
    )
    names = [e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"]
    assert names == ["student/0", "student/1", "student/2", "trainer/0", "trainer/1"]
    places = sorted((e["pid"], e["tid"]) for e in events(trace))
    assert places == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_a_replica_keeps_its_track_when_the_run_is_resumed(tmp_path: Path) -> None:
    first = sink(tmp_path)
    first.busy({"rollout": [interval(0, 1, "generate", f"student/{at}") for at in range(2)]})
    first.close(SUMMARY)
    second = sink(tmp_path, resumed=True)
    second.busy({"rollout": [interval(1, 2, "generate", f"student/{at}") for at in (1, 0)]})
    assert [e["tid"] for e in events(second)] == [0, 1, 1, 0]
    assert sum(e["name"] == "thread_name" for e in events(second, "M")) == 2


def test_arrows_lead_from_generation_to_step_and_have_all_moments(tmp_path: Path) -> None:
    trace, (first, last) = sink(tmp_path), way()
    first["train"] = [interval(2.5, 2.5, "lease", sample=UID)]  # no slice: no arrow leads to it
    trace.busy({"admission": [interval(0, 0, "admit", sample=UID)]})
    trace.busy(first)

    trace.busy(last)
    check_format(written(trace))
    arrows = [e for e in written(trace)["traceEvents"] if e["ph"] in "stf"]
    assert [(e["ph"], e["id"], e["args"]["uid"]) for e in arrows] == [(k, 1, UID) for k in "stf"]
    assert arrows[-1]["args"]["life"] == [
        ["admission", "admit", "", 0, 0],
        ["rollout", "generate", "student/0", 0, 1_000_000],
        ["teacher/a", "score", "teacher a/1", 1_000_000, 2_000_000],
        ["train", "lease", "", 2_500_000, 2_500_000],
        ["train", "step", "trainer/0", 3_000_000, 4_000_000],
    ]


def test_what_adds_no_event_writes_nothing(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    before = trace.path.stat().st_mtime_ns
    for pools in ({"admission": []}, {"admission": [interval(0, 0, "admit", sample=UID)]}):
        trace.busy(pools)
    assert written(trace)["traceEvents"] == []
    assert trace.path.stat().st_mtime_ns == before


def test_a_sample_that_was_generated_again_has_one_way(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    for report in [way()[0], *way(start=10)]:
        trace.busy(report)
    check_format(written(trace))
    assert [e["ts"] for e in events(trace, "s")] == [11_000_000 - 1]


def test_one_sample_in_a_hundred_is_followed() -> None:
    found = sum(is_traced(f"p{prompt}/{member}") for prompt in range(5000) for member in range(4))
    assert 0.8 < found / 20_000 * TRACED < 1.2


def test_the_oldest_of_samples_that_are_never_trained_are_forgotten() -> None:
    flows = SampleFlows()
    for number in range(MAX_PENDING + 2):
        flows.add("rollout", interval(0, 1, sample=str(number)))
    known = [len(flows.add("train", interval(1, 2, sample=str(n)))) for n in (0, 1, 2)]
    assert known == [0, 0, 2]


def check_format(content: dict[str, Any]) -> None:
    """What the trace event format asks for: nesting slices, and arrows that begin and end.

    An arrow's point must lie within a slice of its thread.
    """
    found = content["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in found:
        assert e["ph"] in "XMistf"  # complete events: nothing that must be closed
        if e["ph"] == "X":
            assert e["dur"] >= 0
            slices.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in slices.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(spans))  # rounded to a microsecond
    assert slices.keys() <= {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    ways: dict[int, list[dict[str, Any]]] = {}
    for e in found:
        if e["ph"] in "stf":
            ways.setdefault(e["id"], []).append(e)
            thread = slices[e["pid"], e["tid"]]
            assert any(start <= e["ts"] <= end for start, end in thread)
    for points in ways.values():
        kinds = "".join(e["ph"] for e in points)
        assert kinds[0] + kinds[-1] == "sf"
        assert set(kinds[1:-1]) <= {"t"}
        assert points[-1]["bp"] == "e"
        assert [e["ts"] for e in points] == sorted(e["ts"] for e in points)


@given(st.sets(st.integers(0, 40)), st.integers(400, 6000), st.integers(0, 12))
def test_whatever_is_killed_or_left_out_the_trace_keeps_to_the_format(
    starts: set[int], max_bytes: int, killed: int
) -> None:
    uids = [uid for uid in map(str, range(8000)) if is_traced(uid)]
    with tempfile.TemporaryDirectory() as folder:
        trace = sink(Path(folder), max_bytes=max_bytes)
        for number, start in enumerate(sorted(starts)):
            if number == killed:  # and never closed; the next process resumes
                trace = sink(Path(folder), max_bytes=max_bytes, resumed=True)
            for report in way(uids[number], 5 * start):
                trace._write([report])
        check_format(json.loads(trace.path.read_text()))


def test_a_disk_that_fills_up_leaves_what_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, pwrite = sink(tmp_path), os.pwrite
    trace._write([{"train": [interval(0, 1)]}])
    room = trace.path.stat().st_size + 50

    def within(file: int, data: memoryview, at: int) -> int:
        if at >= room:
            raise OSError(28, "No space left on device")
        return pwrite(file, data[: room - at], at)

    monkeypatch.setattr(module.os, "pwrite", within)
    with pytest.raises(OSError, match="No space left"):
        trace._write([{"train": [interval(1, 2), interval(2, 3)]}])
    kept = json.loads(trace.path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in kept) == 1


def test_a_disk_that_is_full_is_an_error_at_a_later_report_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    trace = sink(tmp_path)
    monkeypatch.setattr(module.os, "pwrite", no_room)
    trace.busy({"train": [interval(0, 1)]})
    with pytest.raises(OSError, match="No space left"):
        trace.close(SUMMARY)


def test_a_link_in_place_of_the_trace_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    for resumed in (False, True):
        (tmp_path / "trace.json").unlink(missing_ok=True)
        (tmp_path / "trace.json").symlink_to(other)
        trace = TraceSink(tmp_path, resumed=resumed)
        if resumed:
            with pytest.raises(OSError, match="link"):
                trace.start()
        else:
            trace.start()
        assert other.read_text() == "mine"
