"""The trace: which events a pool's intervals become, and that the file is whole at any time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.reports import Interval
from async_opd.observability import trace as module
from async_opd.observability.sinks import Summary
from async_opd.observability.trace import Lanes, TraceSink

START = 1_000_000.0
SUMMARY = Summary("completed", None, 1, 1.0, Path("run"))


def interval(start: float, end: float, what: str = "work") -> Interval:
    return Interval(what, START + start, START + end)


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


def test_an_interval_is_a_complete_event_in_microseconds_since_the_start(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    trace.busy({"rollout": [interval(1.5, 2, "generate")]})
    (event,) = events(trace)
    assert (event["name"], event["ts"], event["dur"]) == ("generate", 1_500_000, 500_000)


def test_a_pool_names_its_process_and_its_thread_once(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    for start in (0, 1):
        trace.busy({"teacher/sort": [interval(start, start + 1)]})
    names = [event["name"] for event in events(trace, "M")]
    assert names == ["process_name", "process_sort_index", "thread_name"]


def test_pools_are_different_processes(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    trace.busy({pool: [interval(0, 1)] for pool in ("rollout", "train")})
    assert len({event["pid"] for event in events(trace)}) == 2


def test_intervals_that_overlap_are_on_different_threads(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    trace.busy({"rollout": [interval(0, 2), interval(1, 3)]})
    assert [event["tid"] for event in events(trace)] == [0, 1]


def test_a_lane_is_used_again_when_it_is_free() -> None:
    found = Lanes().assign([interval(0, 2), interval(1, 3), interval(2, 4)])
    assert [lane for lane, _ in found] == [0, 1, 0]


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


def test_lanes_of_many_replicas_take_no_time_that_grows_with_their_square() -> None:
    lanes, many = Lanes(), 4096
    started = time.process_time()
    for step in range(20):
        assert len(list(lanes.assign([interval(step, step + 1) for _ in range(many)]))) == many
    assert time.process_time() - started < 5  # 0.2 s; lane by lane it is minutes


def test_the_file_is_whole_json_after_every_write(tmp_path: Path) -> None:
    trace = sink(tmp_path)
    assert json.loads(trace.path.read_text())["traceEvents"] == []
    for step in range(1, 4):
        trace._write([{"train": [interval(step, step + 1)]}])
        content = json.loads(trace.path.read_text())
        assert sum(event["ph"] == "X" for event in content["traceEvents"]) == step


def test_a_resumed_run_goes_on_in_the_same_trace(tmp_path: Path) -> None:
    first = sink(tmp_path)
    first.busy({"train": [interval(0, 1)]})
    first.close(SUMMARY)
    second = TraceSink(tmp_path, clock=lambda: START + 100, resumed=True)
    assert second.start() is None
    second.busy({"rollout": [interval(101, 102)], "train": [interval(102, 103)]})
    found = [(event["cat"], event["pid"], event["ts"]) for event in events(second)]
    assert found == [("train", 1, 0), ("rollout", 2, 101_000_000), ("train", 1, 102_000_000)]


def test_a_run_that_was_killed_leaves_a_trace_that_can_be_gone_on_with(tmp_path: Path) -> None:
    first = sink(tmp_path)
    first._write([{"train": [interval(0, 1)]}])  # and it is never closed
    second = sink(tmp_path, resumed=True)
    second.busy({"train": [interval(1, 2)]})
    assert len(events(second)) == 2


@pytest.mark.parametrize("content", ["", "[1, 2", '{"traceEvents": [\n], "otherData": {"a": 1}}\n'])
def test_a_trace_that_was_torn_begins_anew_and_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    trace = TraceSink(tmp_path, resumed=True)
    assert "begins anew" in (trace.start() or "")
    assert events(trace) == []


def test_another_run_does_not_go_on_with_a_trace_that_is_there(tmp_path: Path) -> None:
    first = sink(tmp_path)
    first.busy({"train": [interval(0, 1)]})
    first.close(SUMMARY)
    assert events(sink(tmp_path)) == []


def test_intervals_beyond_the_bound_are_counted_in_the_file_and_told(tmp_path: Path) -> None:
    trace = sink(tmp_path, max_intervals=3)
    for step in range(3):
        trace.busy({"train": [interval(step, step + 1), interval(step + 0.1, step + 0.2)]})
    assert len(events(trace)) == 3
    assert written(trace)["otherData"]["left_out"] == 3
    assert len(events(trace, "i")) == 1
    assert trace.close(SUMMARY) == "trace.json has 3 intervals; 3 were dropped"


def test_a_resumed_run_keeps_to_the_bound_of_the_whole_trace(tmp_path: Path) -> None:
    first = sink(tmp_path, max_intervals=2)
    first.busy({"train": [interval(0, 1)]})
    first.close(SUMMARY)
    second = sink(tmp_path, max_intervals=2, resumed=True)
    second.busy({"train": [interval(1, 2), interval(2, 3)]})
    assert len(events(second)) == 2


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
