"""The record of a run: its files, its sinks, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.log import LogConfig
from async_opd.core.errors import StageError
from async_opd.core.reports import Level
from async_opd.core.samples import DeadLetter, EpisodeFacts, Header
from async_opd.observability import run_log
from async_opd.observability.run_log import LEVELS, RunLog, is_shown, json_line
from async_opd.observability.sinks import Summary
from async_opd.observability.wandb_sink import WandbSink
from async_opd.tools.report.recorded_run import messages
from tests.world.config import run_config

START = 1_000_000.0


class Clock:
    """Stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A sink that remembers its calls, and fails in those it is told to."""

    def __init__(self, name: str = "recorder", fails: tuple[str, ...] = ()) -> None:
        self.name = name
        self.fails = fails
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.fails:
            raise BrokenPipeError(f"no {call[0]}")

    def start(self) -> None:
        self._call("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", step, metrics)

    def rewind(self) -> None:
        self._call("rewind")

    def waits(self, waits: Mapping[str, str]) -> None:
        self._call("waits", waits)

    def busy(self, pools: Mapping[str, Any]) -> None:
        self._call("busy", pools)

    def message(self, text: str) -> None:
        self._call("message", text)

    def close(self, summary: Summary) -> None:
        self._call("close", summary)

    def messages(self) -> list[str]:
        return [call[1] for call in self.calls if call[0] == "message"]


def config(**log: str) -> RunConfig:
    secret = {"model": "teacher", "engine": {"extra": {"hf_token": "abc"}}}
    log = {"console": "off", "wandb": "off", **log}
    return run_config(name="test", teachers={"sort": secret}, log=log)


def opened(run_dir: Path, *sinks: Recorder, clock: Clock | None = None) -> RunLog:
    return RunLog(config(), run_dir, clock=clock or Clock(), sinks=list(sinks))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return content


def test_a_logged_step_is_one_json_line_at_once_and_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (3, 4):
        with opened(tmp_path) as log:
            log.log(step, {"loss/total": 0.5})
            assert lines(tmp_path)[-1] == {"step": step, "time": START, "loss/total": 0.5}
            log.finish("completed")
    assert len(lines(tmp_path)) == 2


def test_a_run_that_goes_back_writes_into_the_file_that_was_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"a": float(step)})
        cut = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:1]
        (tmp_path / "cut").write_text("".join(cut))
        (tmp_path / "cut").replace(tmp_path / "metrics.jsonl")
        log.rewind({"a": 1.0})
        log.log(2, {"b": 2.0})
        log.finish("completed")
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert (summary(tmp_path)["a"], summary(tmp_path)["steps"]) == (1.0, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_null_and_named_once(tmp_path: Path, value: float) -> None:
    sink = Recorder()
    with opened(tmp_path, sink) as log:
        for step in (1, 2):
            log.log(step, {"loss/total": value, "train/lr": 1.0})
        log.finish("completed")
    assert lines(tmp_path)[0]["loss/total"] is None
    assert summary(tmp_path)["loss/total"] is None
    assert [text for text in sink.messages() if "loss/total" in text] == [
        f"loss/total is {value}; metrics.jsonl has null where it is not finite"
    ]


def test_sinks_and_run_log_get_metrics_waits_and_messages_as_they_come(tmp_path: Path) -> None:
    sink = Recorder()
    with opened(tmp_path, sink) as log:
        log.log(1, {"train/lr": 1.0})
        log.waits({"train": "a batch"})
        log.message("a lone \ud800")
        log.finish("failed", "\udcff")
    assert sink.calls[:4] == [
        ("start",),
        ("log", 1, {"train/lr": 1.0}),
        ("waits", {"train": "a batch"}),
        ("message", "a lone \\ud800"),
    ]
    assert sink.messages()[1:] == ["failed: \\udcff"]
    written = [line.split(" ", 1) for line in (tmp_path / "run.log").read_text().splitlines()]
    assert [text for _, text in written] == ["a lone \\ud800", "ERROR failed: \\udcff"]
    assert datetime.fromisoformat(written[0][0]).tzinfo is not None


def test_the_summary_says_how_the_run_ended_and_its_last_values(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as log:
        log.summarize({"eval/sort/accuracy": 0.9})
        log.log(1, {"loss/total": 2.0, "train/lr": 1.0, "eval/sort/accuracy": 0.1})
        log.log(2, {"loss/total": 1.0})
        clock.now += 60
        log.finish("interrupted")
    assert summary(tmp_path) == {
        "status": "interrupted",
        "error": None,
        "steps": 2,
        "seconds": 60.0,
        "run_dir": str(tmp_path),
        "notes": {},
        "loss/total": 1.0,
        "train/lr": 1.0,
        "eval/sort/accuracy": 0.9,
        "log/sink_failures": 0.0,
    }


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bad"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (asyncio.CancelledError(), "interrupted"),
        (None, "failed"),
    ],
)
def test_an_exception_or_no_word_finishes_the_run(
    tmp_path: Path, error: BaseException | None, status: str
) -> None:
    with pytest.raises(type(error)) if error else nullcontext(), opened(tmp_path):
        if error is not None:
            raise error
    assert summary(tmp_path)["status"] == status
    with opened(tmp_path / "other") as log:
        log.finish("interrupted")
        log.finish("completed")
    assert summary(tmp_path / "other")["status"] == "interrupted"  # the first one counts


def test_a_failing_sink_is_reported_once_and_counted_and_the_others_go_on(tmp_path: Path) -> None:
    broken, healthy = Recorder("broken", fails=("log", "close")), Recorder()
    with opened(tmp_path, broken, healthy) as log:
        for step in (1, 2, 3):
            log.log(step, {"train/lr": 1.0})
        log.finish("completed")
    (report,) = [text for text in healthy.messages() if text.startswith("broken failed")]
    assert "BrokenPipeError: no log" in report
    assert [call[1] for call in healthy.calls if call[0] == "log"] == [1, 2, 3]
    failures = [line.get("log/sink_failures") for line in lines(tmp_path)]
    ended = summary(tmp_path)
    assert [*failures, ended["log/sink_failures"]] == [None, 1.0, 2.0, 4.0]
    assert ended["status"] == "completed"


def test_a_sink_that_does_not_start_is_not_called_again(tmp_path: Path) -> None:
    broken = Recorder(fails=("start",))
    with opened(tmp_path, broken) as log:
        log.log(1, {})
        log.finish("completed")
    assert broken.calls == [("start",)]
    assert log.failures == 1


def test_the_console_starts_before_wandb_and_closes_after_it(tmp_path: Path) -> None:
    order: list[str] = []
    wandb, console = Recorder("wandb"), Recorder("console")
    wandb._call = lambda *call: order.append(f"wandb {call[0]}")  # type: ignore[method-assign]
    console._call = lambda *call: order.append(f"console {call[0]}")  # type: ignore[method-assign]
    with opened(tmp_path, wandb, console) as log:
        log.finish("completed")
    assert order[:2] == ["console start", "wandb start"]
    assert order[-2:] == ["wandb close", "console close"]


def test_an_unreachable_wandb_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def unreachable(**_: Any) -> None:
        raise wandb.errors.CommError("timed out")

    monkeypatch.setattr(wandb, "init", unreachable)
    with RunLog(config(wandb="online"), tmp_path, clock=Clock()) as log:
        log.log(1, {"train/lr": 1.0})
        log.finish("completed")
    assert summary(tmp_path)["log/sink_failures"] == 1.0
    assert "wandb failed: CommError: timed out" in (tmp_path / "run.log").read_text()


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Neither wandb credentials nor settings of the machine count."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def mode_of(monkeypatch: pytest.MonkeyPatch, wanted: str, mode: str = "online") -> str:
    """The mode that wandb.init is called with."""
    import wandb

    seen: list[str] = []

    def init(**arguments: Any) -> None:
        seen.append(arguments["mode"])
        raise ConnectionError

    settings = wandb.Settings(api_key=None, base_url="https://api.wandb.ai", mode=mode)
    monkeypatch.setattr(wandb, "init", init)
    made = SimpleNamespace(settings=settings, most_recent_active_run=None)
    monkeypatch.setattr(wandb, "setup", lambda *_: made)
    with pytest.raises(ConnectionError):
        WandbSink(config(wandb=wanted), Path()).start()
    return seen[0]


@pytest.mark.parametrize(
    ("key", "netrc", "mode", "expected"),
    [
        (False, "", "online", "offline"),
        (True, "", "online", "online"),
        (False, f"machine api.wandb.ai login user password {'0' * 40}\n", "online", "online"),
        (False, "nothing api.wandb.ai\n", "online", "offline"),
        (True, "", "offline", "offline"),
    ],
)
def test_wandb_auto_is_online_with_a_login_unless_wandb_is_set_offline(
    no_login: pytest.MonkeyPatch, tmp_path: Path, key: bool, netrc: str, mode: str, expected: str
) -> None:
    if key:
        no_login.setenv("WANDB_API_KEY", "0" * 40)
    if netrc:
        file = tmp_path / "netrc"
        file.write_text(netrc)
        file.chmod(0o600)
    assert mode_of(no_login, "auto", mode) == expected


@pytest.mark.slow
def test_wandb_offline_writes_below_the_run_directory_and_prints_nothing_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))  # wandb advertises for it
    with RunLog(config(wandb="offline"), tmp_path, clock=Clock()) as log:
        log.log(0, {"eval_initial/sort/accuracy": 0.5})
        log.log(1, {"loss/total": float("nan")})
        log.finish("failed", "out of memory")
    assert (tmp_path / "run.log").read_text().count("wandb") == 0
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert log.failures == 0
    assert capfd.readouterr() == ("", "failed: out of memory\n")


def test_importing_the_log_imports_neither_wandb_nor_rich() -> None:
    code = (
        "import sys, async_opd.observability.run_log, async_opd.observability.trace;"
        "print({'wandb', 'rich', 'torch', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_dead_letters_have_a_file_and_the_first_of_each_stage_a_message(tmp_path: Path) -> None:
    sink = Recorder()
    with opened(tmp_path, sink) as log:
        assert not (tmp_path / "dead_letters.jsonl").exists()
        for uid, stage in (("a", "grader"), ("b", "grader"), ("c", "prompt")):
            log.dead_letter(DeadLetter(Header(uid, 7, 100, 3, "t"), "bad", stage))
        log.finish("completed")
    entries = [json.loads(e) for e in (tmp_path / "dead_letters.jsonl").read_text().splitlines()]
    first = {"time": START, "uid": "a", "teacher": "t", "tokens": 7}
    assert (len(entries), entries[0]) == (3, {**first, "stage": "grader", "reason": "bad"})
    assert [text for text in sink.messages() if "dead" in text] == [
        "dead-lettered a (grader): bad",
        "dead-lettered c (prompt): bad",
    ]


def test_a_dead_letter_of_an_episode_has_its_turns(tmp_path: Path) -> None:
    header = Header("a", 7, 100, 3, "t", episode=EpisodeFacts(4))
    with opened(tmp_path) as log:
        log.dead_letter(DeadLetter(header, "bad", "environment"))
    (line,) = (tmp_path / "dead_letters.jsonl").read_text().splitlines()
    assert json.loads(line)["turns"] == 4


def test_a_full_disk_ends_the_run_with_the_files_name(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        with open("/dev/full", "w") as full:  # a device that is always full
            os.dup2(full.fileno(), log._metrics_file.fileno())
        with pytest.raises(StageError, match=r"metrics\.jsonl cannot be written: No space left"):
            log.log(1, {"train/lr": 1.0})
        log.finish("failed", "no space")
    assert summary(tmp_path)["status"] == "failed"


def test_a_run_whose_summary_cannot_be_written_is_not_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").mkdir()
    sink = Recorder()
    with opened(tmp_path, sink) as log:
        assert log.finish("completed") == "failed"
    assert sink.calls[-1][0] == "close"
    assert "summary.json cannot be written: Is a directory" in capsys.readouterr().err


def test_a_run_log_that_cannot_be_written_at_the_end_is_a_failed_run(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        log._messages_file.close()
        with open("/dev/full", "w", buffering=1) as log._messages_file:
            assert log.finish("completed") == "failed"
    assert summary(tmp_path)["status"] == "failed"


@pytest.mark.slow
def test_a_wandb_that_cannot_be_reached_is_offline_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    opened_as, init = [], wandb.init

    def no_server(**arguments: Any) -> Any:
        opened_as.append(arguments["mode"])
        if arguments["mode"] == "online":
            raise wandb.errors.CommError("timed out")
        return init(**arguments)

    monkeypatch.setattr(wandb, "init", no_server)
    with RunLog(config(wandb="online"), tmp_path, clock=Clock()) as log:
        log.log(1, {"train/lr": 1.0})
        assert log.finish("completed") == "completed"
    assert opened_as == ["online", "offline"]
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert (tmp_path / "run.log").read_text().count("wandb cannot be reached (CommError") == 1
    assert log.failures == 0


def test_what_a_killed_process_was_writing_is_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("2026-01-01 step 4, vers")
    with opened(tmp_path) as log:
        log.message("going on")
        log.finish("completed")
    first, second, *_ = (tmp_path / "run.log").read_text().splitlines()
    assert (first, second.endswith("going on")) == ("2026-01-01 step 4, vers", True)


class Slow(Recorder):
    """It ends as soon as ``run.log`` says so often that it is waited for."""

    longest_s = 60.0

    def __init__(self, path: Path, lines: int = 2) -> None:
        super().__init__("slow")
        self.path, self.lines = path, lines

    def close(self, summary: Summary) -> None:
        while self.path.read_text().count("waiting for slow (") < self.lines:
            threading.Event().wait(0.001)


def test_a_sink_that_is_waited_for_has_lines_with_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "EVERY_S", 0.01)
    with RunLog(config(), tmp_path, sinks=[Slow(tmp_path / "run.log")]) as log:
        log.finish("completed")
    written = (tmp_path / "run.log").read_text()
    assert re.search(r"waiting for slow \(\d+ s so far, at most 60 s\)\n", written)


def test_a_failure_is_told_even_if_the_console_is_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(config(console="off"), tmp_path, sinks=[]) as log:
        log.finish("failed", "no more samples")
    assert "no more samples" in capsys.readouterr().err


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
