"""A path that does not exist is refused with the nearest one that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.core.errors import ConfigError, Problem
from async_opd.files.absent import nearest, refuse_absent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for step in (100, 200):
        (tmp_path / "runs" / "quickstart" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(path: Path) -> Problem:
    with pytest.raises(ConfigError) as caught:
        refuse_absent(path, "RUN_DIR")
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("command line", "RUN_DIR")
    return problem


@pytest.mark.parametrize("path", ["runs/quickstart", "runs/../runs", "."])
def test_a_path_that_exists_is_accepted(here: Path, path: str) -> None:
    refuse_absent(Path(path), "RUN_DIR")


def test_a_path_that_does_not_exist_is_refused_as_it_was_typed(here: Path) -> None:
    assert refused(Path("runs/quikstart")).message == "runs/quikstart does not exist"


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("runs/quikstart", "did you mean runs/quickstart?"),
        ("run/quikstart/chekpoints/step_20", "did you mean runs/quickstart/checkpoints/step_200?"),
        ("runs/mine/model", "runs exists, and has quickstart"),
        ("elsewhere", "the working directory has runs"),
        ("runs/quickstart/checkpoints/step_100/x", "step_100 exists, and is empty"),
    ],
)
def test_the_remedy_is_the_nearest_path_that_exists(here: Path, typed: str, remedy: str) -> None:
    assert refused(Path(typed)).remedy.endswith(remedy)


def test_an_absolute_path_has_an_absolute_remedy(here: Path) -> None:
    assert nearest(here / "runs" / "quikstart") == f"did you mean {here}/runs/quickstart?"


def test_of_many_names_some_are_shown_and_the_others_counted(here: Path) -> None:
    for name in "abcdefg":
        (here / "runs" / (name * 9)).mkdir()
    assert refused(Path("runs/xyz")).remedy.endswith("ddddddddd, eeeeeeeee and 3 more")


def test_a_file_on_the_way_is_named(here: Path) -> None:
    (here / "config.yaml").write_text("")
    assert refused(Path("config.yaml/model")).remedy == "config.yaml exists, and is not a directory"


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_a_name_that_no_path_can_have_is_refused(here: Path, path: str) -> None:
    assert "does not exist" in refused(Path(path)).message
