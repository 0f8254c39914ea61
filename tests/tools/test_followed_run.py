"""The lines that a follower of a growing file reads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.tools import watch as followed_run
from async_opd.tools.watch import FollowedLines, FollowedRun


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def test_a_file_that_is_not_there_yet_has_no_lines(path: Path) -> None:
    assert FollowedLines(path).read() == (False, [])


def test_a_line_is_read_once_and_when_it_is_complete(path: Path) -> None:
    lines, file = FollowedLines(path), path.open("a", buffering=1)
    file.write("one\ntw")
    file.flush()
    assert lines.read() == (False, ["one"])
    file.write("o\n")
    assert lines.read() == (False, ["two"])
    assert lines.read() == (False, [])


@pytest.mark.parametrize("content", ["", "one\n", "One\ntwo\nthree\n", "x\n" * 50])
def test_a_file_that_was_replaced_is_read_from_its_begin(path: Path, content: str) -> None:
    path.write_text("one\ntwo\n")
    lines = FollowedLines(path)
    lines.read()
    path.write_text(content)
    assert lines.read() == (True, content.splitlines())


def test_a_file_that_was_cut_and_has_grown_beyond_the_place_since_is_read_again(path: Path) -> None:
    path.write_text('{"step": 1}\n{"step": 2}\n')
    lines = FollowedLines(path)
    lines.read()
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 4}\n')
    again, found = lines.read()
    assert (again, len(found)) == (True, 3)


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=20),
    st.lists(st.integers(0, 30), max_size=20),
)
def test_however_a_file_grows_each_line_is_read_once(texts: list[str], parts: list[int]) -> None:
    data, found = "".join(f"{text}\n" for text in texts).encode(), list[str]()
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        lines, at = FollowedLines(Path(file.name)), 0
        for size in [*parts, len(data)]:
            file.write(data[at : at + size])
            at += size
            again, new = lines.read()
            assert not again
            found += new
    assert found == texts


def test_a_line_that_is_longer_than_one_look_does_not_stop_the_view(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_run, "READ_BYTES", 8)
    path.write_text("x" * 20 + "\nab\n")
    lines, found = FollowedLines(path), list[str]()
    for _ in range(4):
        found += lines.read()[1]
    assert found[-1] == "ab"


def test_a_run_has_news_of_its_metrics_and_of_its_log(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    assert not run.look()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 2, "loss/total": 3}\nno row\n')
    (tmp_path / "run.log").write_text("2026-11-22T01:02:03 begun\n    and more\n")
    news = run.look()
    assert [(row.step, dict(row.values)) for row in news.rows] == [(1, {"loss/total": 3.0})]
    assert [message.text for message in news.messages] == ["begun\n    and more"]
    assert not run.look()
