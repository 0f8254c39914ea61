"""A run as people see it, on a terminal and in a log file."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import AsyncOPDError
from async_opd.observability.live.console import LiveConsole, PlainConsole, open_console
from async_opd.observability.live.view_state import ViewState
from async_opd.observability.sinks import Summary
from async_opd.observability.terminal import terminal_on
from tests.observability.test_run_log import Clock
from tests.world.config import run_config

METRICS = {
    "loss/total": 0.125,
    "train/grad_norm": 1.5,
    "train/lr": 1e-5,
    "rollout/tokens_per_s": 12_345.0,
    "rollout/busy": 0.97,
    "teacher/math/tokens_per_s": 800.0,
    "teacher/math/busy": 0.4,
    "train/tokens_per_s": 900.0,
    "train/busy": 0.5,
    "queue/rollouts/sort/ready": 7.0,
    "queue/rollouts/sort/leased": 2.0,
    "queue/scored/ready": 5.0,
    "queue/scored/leased": 0.0,
    "staleness/mean": 0.75,
    "staleness/max": 2.0,
    "sync/version": 3.0,
    "eval/sort/accuracy": 0.625,
    "perf/overlap": 0.8,
}


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def config(console: str = "auto", steps: int = 100) -> RunConfig:
    teachers = {"sort": {"model": "a"}, "math": {"model": "b"}}
    return run_config(teachers=teachers, train={"steps": steps}, log={"console": console})


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {"status": "completed", "error": None, "steps": 100, "seconds": 3723.0}
    return Summary(**{**values, "run_dir": Path("runs/demo"), **changes})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> ViewState:
    return ViewState(config(), clock)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def plain(state: ViewState, out: io.StringIO, clock: Clock) -> PlainConsole:
    return PlainConsole(state, out, clock)


def row(text: str, label: str) -> list[str]:
    """The words of the line that starts with the label."""
    return next(line for line in text.splitlines() if line.strip().startswith(label)).split()


@pytest.mark.parametrize(
    ("wanted", "term", "kind"),
    [
        ("auto", "xterm-256color", LiveConsole),
        ("auto", "dumb", PlainConsole),
        ("auto", None, PlainConsole),
        ("off", "xterm-256color", type(None)),
    ],
    ids=["live on a terminal", "plain on a dumb one", "plain in a file", "off"],
)
def test_the_console_suits_its_terminal(
    monkeypatch: pytest.MonkeyPatch, out: io.StringIO, wanted: str, term: str | None, kind: Any
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term or "xterm")
    assert isinstance(open_console(config(wanted), file=Terminal() if term else out), kind)


@pytest.mark.parametrize(
    ("rows", "left_s"),
    [
        ([(0, 0)], None),
        ([(500, 0), (20, 10)], 180),
        ([(0, 0), (20, 10), (5, None)], 175),
        ([(0, 90), (10, 91)], 90),
    ],
    ids=[
        "unknown before the first step",
        "the pace since the initial evaluation",
        "falls while no step arrives",
        "a resumed run ignores the steps before",
    ],
)
def test_time_left_follows_the_pace(
    state: ViewState, clock: Clock, rows: list[tuple[float, int | None]], left_s: float | None
) -> None:
    for seconds, step in rows:
        clock.now += seconds
        if step is not None:
            state.post(step, {})
    assert state.left_s == left_s


def test_time_left_ignores_an_earlier_steps_evaluation(state: ViewState, clock: Clock) -> None:
    state.post(90, {})
    clock.now += 10
    state.post(91, {})
    state.post(90, {"eval/sort/accuracy": 0.5})
    assert state.left_s == 90


@pytest.mark.slow
def test_the_live_display_refreshes_while_no_step_arrives(
    state: ViewState, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked, file = threading.Event(), Terminal()
    console = LiveConsole(state, file)
    console.start()
    monkeypatch.setattr(console._live, "refresh", ticked.set)
    assert ticked.wait(timeout=5)
    console.close(summary())
    assert "runs/demo" in file.getvalue()


@pytest.mark.slow
def test_a_display_that_broke_is_an_error_at_the_next_step(
    state: ViewState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise BrokenPipeError("gone")

    console = LiveConsole(state, Terminal())
    console.start()
    with monkeypatch.context() as patch:
        patch.setattr(console._live, "refresh", broken)
        console._ticker.join(timeout=5)
    with pytest.raises(AsyncOPDError, match="gone"):
        console.log(1, {})
    console.close(summary())


def test_steps_in_quick_succession_share_a_plain_line_but_the_last_and_a_broken_one(
    plain: PlainConsole, out: io.StringIO, clock: Clock
) -> None:
    plain.log(0, {"eval_initial/sort/accuracy": 0.1})  # no step
    for step in (*range(1, 6), 100, 101):
        plain.log(step, METRICS)
        clock.now += 0.5
    plain.close(summary(status="failed", error="no memory"))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/100", "5/100", "100/100", "101/100"]
    assert lines[0].startswith("step 1/100  loss 0.125")
    assert "rollout 12.3k tok/s 97% busy" in lines[0]


def test_plain_output_has_no_escape_sequences(
    plain: PlainConsole, out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain.log(1, METRICS)
    plain.message("hello")
    plain.close(summary(metrics={"eval/sort/accuracy": 0.5}))
    assert "\x1b" not in out.getvalue()


def test_the_end_screen_compares_before_after_and_teacher(
    plain: PlainConsole, out: io.StringIO
) -> None:
    metrics = {
        "eval_initial/sort/accuracy": 0.1,
        "eval/sort/accuracy": 0.8,
        "eval_teacher/sort/accuracy": 0.9,
        "eval/math/accuracy": 0.5,
    }
    plain.close(summary(metrics=metrics))
    table = out.getvalue().replace("│", " ")
    assert row(table, "sort") == ["sort", "10.0%", "80.0%", "90.0%"]
    assert row(table, "math") == ["math", "-", "50.0%", "-"]


def test_the_end_screen_of_a_completed_run_has_the_next_commands(
    plain: PlainConsole, out: io.StringIO
) -> None:
    plain.close(summary(run_dir=Path("/my runs/demo"), metrics={"eval/sort/accuracy": 0.5}))
    assert out.getvalue().splitlines()[-3:] == [
        "next      async_opd report '/my runs/demo'",
        "          async_opd eval '/my runs/demo/config.yaml' '/my runs/demo' eval.n=4 "
        "eval.temperature=0.7",
        "          async_opd export '/my runs/demo' demo-student",
    ]


def test_a_run_without_evaluations_is_not_evaluated_next(
    plain: PlainConsole, out: io.StringIO
) -> None:
    plain.close(summary())
    assert "async_opd eval" not in out.getvalue()


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_the_end_screen_of_a_run_that_has_not_completed_has_the_command_that_continues_it(
    plain: PlainConsole, out: io.StringIO, status: str
) -> None:
    plain.close(summary(status=status, error="a signal ended the run"))
    command = "async_opd run runs/demo/config.yaml --run-dir runs/demo --resume"
    assert out.getvalue().splitlines()[-1] == f"continue  {command}"
    assert ("error" in out.getvalue()) == (status == "failed")


def test_the_end_screen_has_status_time_error_and_the_whole_folder(
    plain: PlainConsole, out: io.StringIO
) -> None:
    run_dir = Path("/very/long") / ("x" * 200)
    plain.close(summary(status="failed", error="train: out of memory", run_dir=run_dir))
    for text in ("failed, 100 steps in 1:02:03", "train: out of memory", str(run_dir)):
        assert text in out.getvalue()


def test_a_broken_pipe_does_not_end_the_process() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError("gone")

    with pytest.raises(BrokenPipeError):
        terminal_on(Gone()).print("hello")
