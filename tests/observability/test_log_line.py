"""Lines of run.log: levels, and JSON objects that say stage and replica."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.log import LogConfig
from async_opd.core.reports import Level
from async_opd.observability.run_log import LEVELS, RunLog, is_shown, json_line
from async_opd.tools.report.recorded_run import messages
from tests.observability.test_run_log import Clock, Recorder, config

HOSTILE = "student/0 is ejected: \x1b[2J\n2026-11-22T01:00:00 completed"


def logged(run_dir: Path, sink: Recorder | None = None, **log: Any) -> list[str]:
    """The lines of a run that logs one message of each level."""
    own: RunConfig = config().model_copy(update={"log": LogConfig(console="off", **log)})
    with RunLog(own, run_dir, Clock(), [] if sink is None else [sink]) as record:
        record.message("everything is up")
        record.message(HOSTILE, "warning")
        record.message("trainer: out of memory", "error")
        record.finish("completed")
    return (run_dir / "run.log").read_text().splitlines()


@pytest.mark.parametrize(("level", "count"), [("info", 4), ("warning", 2), ("error", 1)])
def test_messages_below_the_level_are_left_out(tmp_path: Path, level: Level, count: int) -> None:
    sink = Recorder("sink")
    assert len(logged(tmp_path, sink, level=level, format="json")) == count
    assert len(sink.messages()) == count


def test_a_line_of_json_says_level_stage_and_replica(tmp_path: Path) -> None:
    entries = [json.loads(line) for line in logged(tmp_path, format="json")]
    assert [(e["level"], e["stage"], e["replica"]) for e in entries] == [
        ("info", "", ""),
        ("warning", "rollout", "student/0"),
        ("error", "train", ""),
        ("info", "", ""),
    ]
    assert entries[1]["text"].startswith("student/0 is ejected: \\x1b[2J\n    2026-11-22")


@pytest.mark.parametrize(
    ("text", "stage", "replica"),
    [
        ("student/12 is rebuilt", "rollout", "student/12"),
        ("teacher sort/1 is ejected: x", "teacher/sort", "teacher sort/1"),
        ("trainer/3: x", "train", "trainer/3"),
        ("queue: a lease has expired", "queue", ""),
        ("the student is in model", "", ""),
        ("students/1 are many", "", ""),
    ],
)
def test_stage_and_replica_begin_a_text(text: str, stage: str, replica: str) -> None:
    entry = json.loads(json_line("2026-11-22T01:02:03", "info", text))
    assert (entry["stage"], entry["replica"]) == (stage, replica)


@pytest.mark.parametrize("form", ["text", "json"])
def test_both_formats_are_read_back(tmp_path: Path, form: str) -> None:
    lines = logged(tmp_path, format=form)
    assert [message.text.split("\n")[0] for message in messages(lines)] == [
        "everything is up",
        "student/0 is ejected: \\x1b[2J",
        "trainer: out of memory",
        "completed",
    ]
    if form == "text":  # names each level but info
        levels = [line.split()[1] for line in lines if not line.startswith(" ")]
        assert levels == ["everything", "WARNING", "ERROR", "completed"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_hidden(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123456789abcdef0123456789abcdef01")
    own = config().model_copy(update={"log": LogConfig(console="off", format=form)})
    with RunLog(own, tmp_path, Clock(), []) as record:
        record.message("key abcdef0123456789abcdef0123456789abcdef01", "warning")
        record.finish("completed")
    assert "abcdef0123456789" not in (tmp_path / "run.log").read_text()


@given(st.text(), st.sampled_from(LEVELS))
def test_any_text_is_one_line_of_json(text: str, level: Level) -> None:
    line = json_line("2026-11-22T01:02:03", level, text)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["text"] == text
    assert is_shown(level, "info")
    assert is_shown("error", level)
