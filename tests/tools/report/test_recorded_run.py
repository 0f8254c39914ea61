"""The reader of run directories: finished, resumed, torn, running and foreign ones."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import ConfigError
from async_opd.files.run_format import FORMAT_FILE
from async_opd.observability.live.live_file import LiveFile
from async_opd.observability.sinks import Summary
from async_opd.processes.run_lock import run_lock
from async_opd.tools.report.recorded_run import RecordedRun, read_recorded_run
from tests.tools.plan.runs import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_a_finished_run_has_its_config_steps_evaluations_and_summary(folder: Path) -> None:
    run = read_recorded_run(folder)
    assert [row.step for row in run.steps] == list(range(1, 61))
    assert [row.step for row in run.evaluations] == [30]
    assert (run.status, run.config.train.steps) == ("completed", 60)
    assert run.series("eval/seconds") == [(30, 2.5)]
    assert run.pools == ("rollout", "teacher/a", "train")
    assert run.left_out == ()
    for name in ("metrics.jsonl", "summary.json"):
        (folder / name).unlink()
    begun = read_recorded_run(folder)
    assert (begun.rows, begun.messages, begun.status) == ((), (), "running or killed")


@given(kept=st.integers(0, 400))
def test_a_file_that_is_cut_anywhere_has_the_rows_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, kept: int
) -> None:
    folder = write_run(tmp_path_factory.mktemp("cut") / "run", steps=3)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[:kept])
    ended = [json.loads(line)["step"] for line in whole[:kept].split(b"\n")[:-1]]
    assert [row.step for row in read_recorded_run(folder).rows] in (
        ended,
        [*ended, len(ended) + 1],  # only its newline is missing
    )


def test_a_metric_that_is_not_finite_and_a_torn_line_are_left_out(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "a/b": null, "a/c": NaN}\n'
        '{"step": 2, "time\n{"step": 3, "time": 2000.0, "perf/step_s": 1.0}\n'
    )
    first, second = read_recorded_run(folder).rows
    assert (first.values, second.step) == ({}, 3)


def test_messages_keep_the_lines_that_are_indented_below_them(folder: Path) -> None:
    (folder / "run.log").write_text(
        "2026-11-22T10:00:00 starting\n"
        "2026-11-22T10:00:05 student/0 is ejected: it died\n    its last lines\n"
        "2026-11-22T10:00:09 comp"
    )
    texts = [message.text for message in read_recorded_run(folder).messages]
    assert texts == ["starting", "student/0 is ejected: it died\n    its last lines", "comp"]
    first, second, _ = read_recorded_run(folder).messages
    assert second.time - first.time == 5


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles"])
def test_a_time_with_an_offset_is_the_same_moment_for_every_reader(
    zone: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "run.log").write_text("2026-11-22T10:00:00+02:00 starting\n")
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    (message,) = read_recorded_run(folder).messages
    monkeypatch.undo()
    time.tzset()
    assert (message.text, message.time) == ("starting", 1795334400.0)


@pytest.mark.parametrize("status", ['"exploded"', "5", "null", '["completed"]', '""'])
def test_a_summary_of_no_known_status_is_none(folder: Path, status: str) -> None:
    (folder / "summary.json").write_text(f'{{"status": {status}, "seconds": 1.0}}')
    assert read_recorded_run(folder).status == "running or killed"


def test_dead_letters_say_their_stage_and_reason(folder: Path) -> None:
    letter = {"time": 1.0, "uid": "p/0", "teacher": "a", "tokens": 7, "stage": "grader"}
    lines = [json.dumps({**letter, "reason": "it raised"}), '{"time": 2.0, "uid": "p/1", "te']
    (folder / "dead_letters.jsonl").write_text("\n".join(lines))
    (found,) = read_recorded_run(folder).dead_letters
    assert (found.stage, found.reason) == ("grader", "it raised")


def old(folder: Path, sections: str) -> Path:
    """The run as a version would have left it that had other keys."""
    with (folder / "config.yaml").open("a") as file:
        file.write(sections)
    return folder


def test_a_run_of_an_older_version_is_read_without_the_keys_that_are_no_more(folder: Path) -> None:
    old(folder, "older: 1\nsync: {on_stale: fail, rolling: perhaps, timeout_s: 7.0}\n")
    run = read_recorded_run(folder, ["report.gpu_hour_price=2"])
    assert {one.key for one in run.left_out} == {"older", "sync.on_stale", "sync.rolling"}
    assert (run.config.sync.rolling, run.config.sync.timeout_s) == (False, 7.0)
    assert (len(run.steps), run.config.report.gpu_hour_price) == (60, 2.0)
    with pytest.raises(ConfigError, match="no_such_key"):
        read_recorded_run(folder, ["report.no_such_key=2"])


@pytest.mark.parametrize("sections", ["name: [\n", "eval: {n: 4}\n", "queue: {max_samples: 1}\n"])
def test_what_cannot_be_left_out_alone_is_refused(folder: Path, sections: str) -> None:
    with pytest.raises(ConfigError):
        read_recorded_run(old(folder, sections))


@pytest.mark.parametrize("name", [FORMAT_FILE, "config.yaml"])
def test_a_directory_that_is_not_a_run_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError):
        read_recorded_run(folder)


@given(content=st.binary(max_size=200), name=st.sampled_from(["summary.json", "run.log"]))
def test_whatever_a_file_holds_the_run_is_read(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    folder = write_run(tmp_path_factory.mktemp("any") / "run", steps=1)
    (folder / name).write_bytes(content)
    assert isinstance(read_recorded_run(folder), RecordedRun)


@pytest.mark.parametrize("status", ["running", "killed"])
def test_a_run_without_a_summary_is_running_or_killed_by_its_lock(
    folder: Path, status: str
) -> None:
    (folder / "summary.json").unlink()
    live = LiveFile(folder)
    live.start()
    with run_lock(folder) if status == "running" else nullcontext():
        assert read_recorded_run(folder).status == status
    live.close(Summary("failed", None, 0, 0.0, folder))
