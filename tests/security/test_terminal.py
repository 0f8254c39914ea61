"""A stranger's text can neither command a terminal nor look like a line of the run's own."""

from __future__ import annotations

import asyncio
import io
import os
import unicodedata
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd import __version__, cli
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.printable import escaped, indented, on_one_line
from async_opd.core.row import Row
from async_opd.core.samples import DeadLetter, Header
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import GradeError
from async_opd.observability.live.console import LiveConsole, PlainConsole
from async_opd.observability.live.view_state import ViewState
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Sink
from async_opd.observability.terminal import terminal_on
from async_opd.processes.output import nonblocking
from async_opd.processes.user_process import READ_BYTES, SHOWN_BYTES, UserOutput
from tests.observability.test_run_log import config
from tests.security.test_keys import SHAPES

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J"
CLIPBOARD = "\x9d52;c;Y3VybCBldmls\x9c"
FORGED = "\n2026-11-22T01:00:00 completed"
REVERSED = "\u202egnihton\u2066"
HOSTILE = f"{TITLE}{CLEAR}{CLIPBOARD}{REVERSED}\r{FORGED}\x85completed\u2028completed[bold]"

Graded = Callable[..., Coroutine[Any, Any, float]]
Text = st.text(st.characters(blacklist_categories=()) | st.sampled_from(HOSTILE))


def commands(text: str) -> list[str]:
    """Characters that a terminal or a reader of lines would obey; newlines and tabs aside."""
    bidirectional = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return [
        char
        for char in text
        if (unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs") and char not in "\n\t")
        or unicodedata.bidirectional(char) in bidirectional
        or char in "\u200e\u200f\u061c"
    ]


@given(Text)
def test_escaped_text_commands_nothing(text: str) -> None:
    assert commands(escaped(text)) == []


@given(Text)
def test_only_the_first_line_of_indented_text_is_not_indented(text: str) -> None:
    assert all(line.startswith("  ") for line in indented(text).splitlines()[1:])


@given(Text)
def test_a_name_is_on_one_line(text: str) -> None:
    assert len(on_one_line(text).splitlines()) <= 1


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert on_one_line(text) == text


def outputs(run_dir: Path, use: Any) -> dict[str, str]:
    """The output of a run that is used so, in run.log and on both consoles."""
    plain, live = io.StringIO(), io.StringIO()
    dashboard = ViewState(config())
    display = LiveConsole(dashboard, live)
    sinks: list[Sink] = [PlainConsole(ViewState(config()), plain), display]
    with RunLog(config(), run_dir, sinks=sinks) as log:
        use(log)
        terminal = terminal_on(live, plain=True)
        terminal.print(display.render())
        log.finish("failed", HOSTILE)
    shown = live.getvalue()
    return {"run.log": (run_dir / "run.log").read_text(), "plain": plain.getvalue(), "live": shown}


def metrics(log: RunLog) -> None:
    log.log(1, {f"eval/{HOSTILE}/accuracy": 0.5, f"queue/{HOSTILE}/ready": 1.0})


def lost(log: RunLog) -> None:
    log.dead_letter(DeadLetter(Header(HOSTILE, 1, 1, 0, "t"), "grader", HOSTILE))


@pytest.mark.parametrize(
    "use",
    [
        lambda log: log.message(HOSTILE),
        lambda log: log.waits({"rollout": HOSTILE, HOSTILE: "x"}),
        metrics,
        lost,
    ],
    ids=["message", "waits", "metrics", "dead letter"],
)
def test_nothing_that_a_stranger_wrote_commands_the_terminal_or_the_log(
    tmp_path: Path, use: Any
) -> None:
    for where, text in outputs(tmp_path, use).items():
        assert commands(text) == [], where
        lines = [line for line in text.splitlines() if line.startswith("2026-11-22T01:00:00")]
        assert lines == [], where


def test_a_line_of_run_log_that_is_not_indented_begins_with_the_time(tmp_path: Path) -> None:
    outputs(tmp_path, lambda log: log.message(HOSTILE))
    for line in (tmp_path / "run.log").read_text().splitlines():
        assert line.startswith("  ") or (line[:2] == "20" and line[10] == "T")
        assert not line.endswith("01:00:00 completed") or line.startswith("  ")


def test_a_strangers_markup_is_text() -> None:
    out = io.StringIO()
    terminal_on(out, plain=True).print("[bold]a[/bold] [/nothing] [link=http://x]b")
    assert out.getvalue() == "[bold]a[/bold] [/nothing] [link=http://x]b\n"


def test_the_command_line_escapes_what_an_error_quotes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any) -> None:
        raise ConfigError([Problem(HOSTILE, "key", HOSTILE, HOSTILE)])

    monkeypatch.setattr(cli, "load_given", load)
    assert cli.main(["run", "config.yaml"]) == cli.BAD_INPUT
    told = capsys.readouterr().err
    assert commands(told) == []
    assert all(line.startswith("  ") for line in told.splitlines()[1:])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command fails with an error that is not expected, which quotes a stranger's text."""

    def load(*_: Any) -> None:
        raise RuntimeError(f"{SHAPES['Groq']}\n{HOSTILE}") from ValueError(HOSTILE)

    monkeypatch.setattr(cli, "load_given", load)


def test_a_traceback_of_the_command_line_is_whole_and_commands_nothing(
    failing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "config.yaml"]) == cli.FAILED
    shown = capsys.readouterr().err
    assert commands(shown) == []
    assert "ValueError" in shown.partition("the direct cause of")[0]
    assert "in load" in shown.rpartition("Traceback")[2]


def test_a_traceback_of_the_command_line_shows_no_key(
    failing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["run", "config.yaml"])
    assert SHAPES["Groq"] not in capsys.readouterr().err


def test_an_error_that_is_not_expected_ends_with_how_to_report_it(
    failing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["run", "config.yaml"])
    words = f"failed: RuntimeError, which is a bug of async_opd {__version__}\n    → report it with"
    assert words in capsys.readouterr().err


def test_a_panic_of_a_library_in_rust_is_an_error_that_is_not_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException):
        """As pyo3 has it, which no module exports."""

    def load(*_: Any) -> None:
        raise PanicException(HOSTILE)

    monkeypatch.setattr(cli, "load_given", load)
    assert cli.main(["run", "config.yaml"]) == cli.FAILED
    assert commands(capsys.readouterr().err) == []


GRADER = """
import os, subprocess, sys

def prints(response, row):
    print(response)
    sys.stderr.write(response)
    return 1.0

def has_a_child_that_prints(response, row):
    subprocess.run(["printf", "%s", response], check=True)
    subprocess.run(["sh", "-c", 'printf %s "$1" >&2', "sh", response], check=True)
    return 1.0

def writes_to_descriptors(response, row):
    for number in (1, 2):
        os.write(number, response.encode())
    return 1.0

def dies(response, row):
    os.write(2, response.encode())
    os._exit(3)

def leaves_a_child(response, row):
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    return 1.0

def writes_very_much(response, row):
    for _ in range(64):
        print("x" * (1 << 14))
    return 1.0
"""


class TestWhatAGraderWrites:
    @pytest.fixture
    def written(self) -> io.StringIO:
        return io.StringIO()

    @pytest.fixture
    def graded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: io.StringIO
    ) -> Graded:
        (tmp_path / "writers.py").write_text(GRADER)
        monkeypatch.syspath_prepend(str(tmp_path))

        async def graded(name: str, response: str = HOSTILE.replace("\u202e", "")) -> float:
            monkeypatch.setattr("sys.stderr", written)
            graders = Graders(GraderSpec(f"writers:{name}", GradingConfig(processes=1), 60))
            try:
                return await graders.grade(response, Row("0:7", "a", "p", "x", {}))
            finally:
                graders.close()

        return graded

    @pytest.mark.parametrize("name", ["prints", "has_a_child_that_prints", "writes_to_descriptors"])
    async def test_is_escaped_and_says_where_it_comes_from(
        self,
        written: io.StringIO,
        graded: Graded,
        capfd: pytest.CaptureFixture[str],
        name: str,
    ) -> None:
        assert await graded(name) == 1
        assert written.getvalue().count("completed[bold]") == 2
        assert commands(written.getvalue()) == []
        assert all(line.startswith("  grader: ") for line in written.getvalue().splitlines())
        assert "owned" not in "".join(capfd.readouterr())

    async def test_is_shown_when_it_was_its_last(
        self, written: io.StringIO, graded: Graded
    ) -> None:
        with pytest.raises(GradeError, match="exit code 3"):
            await graded("dies", "no memory left")
        assert written.getvalue() == "  grader: no memory left\n"

    async def test_is_not_waited_for_when_a_child_lives_on(self, graded: Graded) -> None:
        assert await asyncio.wait_for(graded("leaves_a_child"), 30) == 1

    async def test_is_bounded_and_what_is_left_out_is_counted(
        self, written: io.StringIO, graded: Graded
    ) -> None:
        assert await graded("writes_very_much") == 1
        assert len(written.getvalue()) < 2 * SHOWN_BYTES
        dropped = 64 * ((1 << 14) + 1) - SHOWN_BYTES
        assert f"({dropped} bytes dropped)" in written.getvalue()

    async def test_may_be_read_by_nobody(self) -> None:
        ours, theirs = os.pipe()
        with os.fdopen(theirs, "w") as file:
            output = UserOutput("grader", nonblocking(file))
            for _ in range(100):
                output.renew()
                os.write(output.writer, b"x" * READ_BYTES)
                output._take()
            os.close(ours)
            os.write(output.writer, b"gone\n")
            os.close(output.writer)
            output.close()

    async def test_is_taken_until_everybody_has_closed_it(self, written: io.StringIO) -> None:
        output = UserOutput("grader", written)
        os.write(output.writer, "ä".encode()[:1])
        await asyncio.sleep(0)
        os.write(output.writer, "ä".encode()[1:] + b"\n")
        os.close(output.writer)
        output.close()
        output.close()
        assert written.getvalue() == "  grader: ä\n"
