"""An episode is shown turn by turn: on a terminal, and in the report."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from async_opd.cli import main
from async_opd.microscope import records
from tests.tools.report.pages import write_full_run
from tests.world.cli import Cli

EPISODE, SINGLE = "0:2#0/0", "0:1#0/0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_run(tmp_path_factory.mktemp("turns") / "run", hostile=False)


def texts(folder: Path, start: int, end: int) -> str:
    (one,) = (one for one in records(folder) if one.uid == EPISODE)
    return "".join(map(one.text, one["token"][start:end]))


def test_each_turn_has_its_number_segment_and_context(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    lines = [line.rstrip() for line in cli("inspect", folder, EPISODE).out.splitlines()]
    first = lines.index("turn 1, segment 0:")
    assert lines[first + 1] == f"response {texts(folder, 0, 10)}".rstrip()
    assert lines[first + 2].startswith("turn 2, segment 1: the grader raised")
    assert lines[first + 3] == f"response {texts(folder, 10, 24)}".rstrip()


def test_a_single_turn_has_no_number(folder: Path, cli: Cli) -> None:
    assert "turn 1" not in cli("inspect", folder, SINGLE).out


@pytest.mark.usefixtures("one_bundle")
@pytest.mark.slow
def test_the_report_has_the_turns_between_their_tokens(folder: Path) -> None:
    assert main(["report", str(folder), "--no-plan"]) == 0
    page = (folder / "report.html").read_text()
    (card,) = re.findall(rf"<h3>{re.escape(EPISODE)}</h3>.*?</article>", page)
    before, between, after = re.split(r'<span class="soft"> turn \d, ', card)
    shown = [unescape(one) for one in re.findall(r'class="tok"[^>]*>([^<]*)<', between)]
    assert "".join(shown) == texts(folder, 0, 10)
    assert after.startswith("segment 1: the grader raised")
    assert 'class="tok"' not in before
