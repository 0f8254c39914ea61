"""The trace: which events a pool's intervals become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_opd.core.stages import Interval
from async_opd.core.trace import Trace, lanes

START = 1_000_000.0


def events(trace: Trace, kind: str) -> list[dict[str, Any]]:
    content = json.loads(trace.write().read_text())
    return [event for event in content["traceEvents"] if event["ph"] == kind]


def test_an_interval_is_a_complete_event_in_microseconds_since_the_start(tmp_path: Path) -> None:
    trace = Trace(tmp_path, START)
    trace.add("rollout", [Interval("generate", START + 1.5, START + 2)])
    (event,) = events(trace, "X")
    assert (event["name"], event["ts"], event["dur"]) == ("generate", 1_500_000, 500_000)


def test_a_pool_names_its_process_and_its_thread(tmp_path: Path) -> None:
    trace = Trace(tmp_path, START)
    trace.add("teacher/sort", [Interval("score", START, START + 1)])
    names = {event["name"]: event["args"].get("name") for event in events(trace, "M")}
    assert names["process_name"] == names["thread_name"] == "teacher/sort"


def test_pools_are_different_processes(tmp_path: Path) -> None:
    trace = Trace(tmp_path, START)
    for pool in ("rollout", "train"):
        trace.add(pool, [Interval("work", START, START + 1)])
    assert len({event["pid"] for event in events(trace, "X")}) == 2


def test_intervals_that_overlap_are_on_different_threads(tmp_path: Path) -> None:
    trace = Trace(tmp_path, START)
    trace.add("rollout", [Interval("a", START, START + 2), Interval("b", START + 1, START + 3)])
    assert [event["tid"] for event in events(trace, "X")] == [0, 1]


def test_a_lane_is_used_again_when_it_is_free() -> None:
    first, second, third = (Interval("a", 0, 2), Interval("b", 1, 3), Interval("c", 2, 4))
    assert lanes([third, second, first]) == [[first, third], [second]]


def test_intervals_may_be_added_after_a_write(tmp_path: Path) -> None:
    trace = Trace(tmp_path, START)
    trace.add("train", [Interval("step", START, START + 1)])
    trace.write()
    trace.add("train", [Interval("step", START + 1, START + 2)])
    assert len(events(trace, "X")) == 2


def test_writing_leaves_only_the_trace(tmp_path: Path) -> None:
    Trace(tmp_path, START).write()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
