"""The harness of ``qualify`` on rows that end in every way: its report and exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from async_opd.cli import main
from async_opd.tools.qualify import command, harness, rows
from async_opd.tools.qualify.rows import Bound, GpuRow
from tests.processes.test_signals import is_gone
from tests.world.cli import Cli

HERE: dict[str, Any] = {
    "gpus": 0,
    "device": "cpu",
    "device_name": "a processor",
    "versions": {"torch": "2.13"},
}


def right(report: Any) -> None:
    report.cell(lambda: {"wrong": 0}, what="it")


def wrong(report: Any) -> None:
    report.cell(lambda: {"wrong": 3}, what="it")


def raising(report: Any) -> None:
    report.cell(lambda: {"wrong": 1 // 0}, what="it")
    report.cell(lambda: {"wrong": 0}, what="the next")


def dying(report: Any) -> None:
    right(report)
    print("the last words")
    os._exit(7)


def hanging(report: Any) -> None:
    right(report)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)


def skipping(report: Any) -> None:
    from async_opd.tools.qualify.measurements.measuring import Skip

    def absent() -> dict[str, Any]:
        raise Skip("flash-attn is not installed")

    report.cell(absent, what="it")


def silent(report: Any) -> None:
    """Measures nothing."""


def breaking(report: Any) -> None:
    """Raises outside of its cells."""
    right(report)
    raise KeyError("gone")


def slow(report: Any) -> None:
    """Its second cell would take longer than is left."""
    right(report)
    report.longest = report.seconds
    report.cell(lambda: {"wrong": 3}, what="the next")


def exhausting(report: Any) -> None:
    import torch

    def large() -> dict[str, Any]:
        raise torch.OutOfMemoryError("tried to allocate 99 GiB")

    right(report)
    report.cell(large, what="large")


def after_a_progress_bar(report: Any) -> None:
    print("loading: 50%", end="", flush=True)
    right(report)


KINDS = (
    right,
    wrong,
    raising,
    dying,
    hanging,
    skipping,
    silent,
    breaking,
    slow,
    exhausting,
    after_a_progress_bar,
)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, GpuRow]:
    """Rows by the functions above, in place of those of the package; the machine is HERE."""
    own = {}
    for kind in KINDS:
        module = ModuleType(f"async_opd.tools.qualify.measurements.{kind.__name__}")
        module.main = kind  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        minutes = 0.03 if kind is hanging else 1.0
        own[kind.__name__] = GpuRow("a test", kind.__name__, minutes, (Bound("wrong", 0),))
    own["greedy"] = replace(own["exhausting"], may_exhaust=True)
    own["absent"] = GpuRow("a test", "right", 1, (), packages=("no_such_package",))
    own["two_gpus"] = GpuRow("a test", "right", 1, (), gpus=2, cpu=False)
    for module in (command, harness, rows):
        if hasattr(module, "ROWS"):
            monkeypatch.setattr(module, "ROWS", own)
    monkeypatch.setattr(harness, "machine_of", lambda gpus: HERE)
    monkeypatch.setattr(harness, "GRACE_S", 0.5)
    return own


@pytest.fixture
def passing(table: dict[str, GpuRow]) -> None:
    """The rows that the help names, which pass."""
    row = table["right"]
    table.clear()
    table.update(streams=row, weights=row)


def qualified(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report's rows."""
    code = main(["qualify", "--out", str(tmp_path / "report.json"), *words])
    return code, json.loads((tmp_path / "report.json").read_text())["rows"]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("table")]


@pytest.mark.parametrize(
    ("name", "outcome", "why"),
    [
        ("right", "passed", ""),
        ("wrong", "failed", "wrong at most 0: 3"),
        ("raising", "failed", "what it: ZeroDivisionError"),
        ("dying", "failed", "exit code 7"),
        ("hanging", "failed", "stopped after its 2 s"),
        ("silent", "failed", "no cell has this figure"),
        ("breaking", "failed", "exit code 1"),
        ("slow", "incomplete", "not reached: what the next"),
        ("exhausting", "failed", "what large: tried to allocate 99 GiB"),
        ("greedy", "passed", ""),
        ("after_a_progress_bar", "passed", ""),
        ("skipping", "could not run", "flash-attn is not installed"),
        ("absent", "could not run", "it needs no_such_package, not installed here"),
        ("two_gpus", "could not run", "it needs 2 GPUs, and torch finds 0"),
    ],
)
def test_a_row_has_its_outcome_and_why(name: str, outcome: str, why: str, tmp_path: Path) -> None:
    code, found = qualified(tmp_path, "--only", name)
    assert found[name]["outcome"] == outcome
    assert why in "".join(found[name]["why"])
    assert code == (outcome in ("failed", "incomplete"))


def test_the_report_has_the_cells_from_before_a_failure_and_the_end_of_the_output(
    tmp_path: Path,
) -> None:
    _, found = qualified(tmp_path, "--only", "dying")
    assert found["dying"]["cells"] == [{"what": "it", "wrong": 0}]
    assert "the last words" in found["dying"]["output"]


def test_the_output_has_the_traceback_of_an_error_outside_of_cells(tmp_path: Path) -> None:
    _, found = qualified(tmp_path, "--only", "breaking")
    assert "KeyError: 'gone'" in found["breaking"]["output"]


def test_an_incomplete_row_is_measured_again_by_a_second_call(
    tmp_path: Path, table: dict[str, GpuRow], capsys: pytest.CaptureFixture[str]
) -> None:
    qualified(tmp_path, "--only", "slow")
    assert "1 row left: slow\n    → run the same command again" in capsys.readouterr().out
    table["slow"] = replace(table["slow"], module="right")
    for name in [name for name in table if name != "slow"]:
        del table[name]
    code, found = qualified(tmp_path)
    assert found["slow"]["outcome"] == "passed"
    assert code == 0


def test_all_rows_are_measured_although_some_fail(tmp_path: Path, table: dict[str, GpuRow]) -> None:
    code, found = qualified(tmp_path)
    assert code == 1
    assert list(found) == list(table)


def test_a_second_call_goes_on_after_the_rows_that_have_ended(tmp_path: Path) -> None:
    qualified(tmp_path, "--only", "right,wrong")
    before = (tmp_path / "report.json").stat().st_mtime_ns
    file = tmp_path / "report.json"
    given = json.loads(file.read_text())
    given["rows"]["right"]["seconds"] = -1
    file.write_text(json.dumps(given))
    code, found = qualified(tmp_path)
    assert found["right"]["seconds"] == -1
    assert "silent" in found
    assert code == 1
    assert file.stat().st_mtime_ns > before


def test_a_failed_row_is_measured_again_where_it_is_named(tmp_path: Path) -> None:
    qualified(tmp_path, "--only", "wrong")
    given = json.loads((tmp_path / "report.json").read_text())
    given["rows"]["wrong"]["seconds"] = -1
    (tmp_path / "report.json").write_text(json.dumps(given))
    _, found = qualified(tmp_path, "--only", "wrong")
    assert found["wrong"]["seconds"] >= 0


def test_rows_for_which_there_is_no_time_are_left_for_the_next_call(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    table: dict[str, GpuRow],
) -> None:
    moments = iter([0.0])
    clock = ModuleType("clock")
    clock.monotonic = lambda: next(moments, 30.0)  # type: ignore[attr-defined]
    monkeypatch.setattr(harness, "time", clock)
    table["quick"] = replace(table["right"], minutes=0.4)
    code, found = qualified(tmp_path, "--only", "right,quick", "--minutes", "1")
    assert found["quick"]["outcome"] == "passed"
    assert list(found) == ["quick"]  # the other may take a minute, and 30 s are left
    assert "1 row left: right" in capsys.readouterr().out
    assert code == 1  # although no row has failed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "wright"], "--only: 'wright' is not a row"),
        (["--minutes", "0.5"], "--minutes: is 0.5, and the longest of these rows may take 1"),
        (["--gpus", "-1"], "--gpus: is negative"),
    ],
)
def test_bad_arguments_are_refused_with_exit_code_2(
    words: list[str], says: str, tmp_path: Path, cli: Cli
) -> None:
    assert says in cli("qualify", "--out", tmp_path / "report.json", *words, code=2).err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "is not a report of qualify"),
        (
            '{"machine": {"device_name": "H100"}, "rows": {}}',
            "is of another machine: device_name H100",
        ),
    ],
)
def test_a_file_that_is_not_a_report_of_this_machine_is_refused(
    content: str, says: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "report.json").write_text(content)
    assert says in cli("qualify", "--out", tmp_path / "report.json", code=2).err
    assert (tmp_path / "report.json").read_text() == content


def test_a_folder_in_place_of_the_report_is_refused(tmp_path: Path, cli: Cli) -> None:
    assert "cannot be read" in cli("qualify", "--out", tmp_path, code=2).err


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path, cli: Cli) -> None:
    printed = cli("qualify", "--out", tmp_path / "no" / "report.json", code=2)
    assert "cannot be written" in printed.err


def test_sigterm_ends_a_row_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def work() -> None:
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)

    with pytest.raises(SystemExit):
        harness.forked(log, 60, work)
    assert is_gone(int(log.read_text()))
