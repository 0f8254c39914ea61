"""What a stranger wrote can neither command a terminal nor look like a line of the run's own."""

from __future__ import annotations

import io
import os
import unicodedata
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd import cli
from async_opd.core.board import Board
from async_opd.core.console import LiveConsole, PlainConsole, terminal_on
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.grader_process import Quoted
from async_opd.core.outlet import outlet_on
from async_opd.core.printable import escaped, indented, on_one_line
from async_opd.core.runlog import RunLog
from async_opd.core.samples import Header, Lost
from async_opd.core.sink import Sink
from tests.core.test_runlog import config

TITLE = "\x1b]0;owned\x07"
CLEAR = "\x1b[2J"
CLIPBOARD = "\x9d52;c;Y3VybCBldmls\x9c"
FORGED = "\n2026-11-22T01:00:00 completed"
REVERSED = "\u202egnihton\u2066"
HOSTILE = f"{TITLE}{CLEAR}{CLIPBOARD}{REVERSED}\r{FORGED}\x85completed\u2028completed[bold]"

Text = st.text(st.characters(blacklist_categories=()) | st.sampled_from(HOSTILE))


def commands(text: str) -> list[str]:
    """What a terminal, or who reads lines, would obey; newlines and tabs aside."""
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
    """What a run that is used so leaves in run.log and on both consoles."""
    plain, live = io.StringIO(), io.StringIO()
    board = Board(config())
    display = LiveConsole(board, live)
    sinks: list[Sink] = [PlainConsole(Board(config()), plain), display]
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
    log.dead_letter(Lost(Header(HOSTILE, 1, 1, 0, "t"), "grader", HOSTILE))


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

    monkeypatch.setattr(cli, "_load", load)
    assert cli.main(["run", "config.yaml"]) == cli.BAD_INPUT
    told = capsys.readouterr().err
    assert commands(told) == []
    assert all(line.startswith("  ") for line in told.splitlines()[1:])


def test_what_a_grader_prints_is_escaped_and_says_where_it_comes_from() -> None:
    out = io.StringIO()
    print(HOSTILE, "and", HOSTILE, file=cast(TextIO, Quoted(out)))
    assert commands(out.getvalue()) == []
    assert all(line.startswith("  grader: ") for line in out.getvalue().splitlines())


def test_a_grader_whose_output_nobody_reads_goes_on() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as file:
        quoted = Quoted(outlet_on(file))
        for _ in range(3):
            quoted.write("x" * (1 << 20) + "\n")
        os.close(ours)
        quoted.write("gone\n")
