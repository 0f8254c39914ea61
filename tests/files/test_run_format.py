"""A run directory says which format it has, and every other format is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_opd.core.errors import ConfigError, Problem
from async_opd.files.run_format import (
    FORMAT_FILE,
    RUN_FORMAT,
    refuse_no_run,
    refuse_other_formats,
    write_run_format,
)


def refused(run_dir: Path) -> Problem:
    with pytest.raises(ConfigError) as caught:
        refuse_other_formats(run_dir)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == (str(run_dir / FORMAT_FILE), "run_format")
    assert problem.message.endswith(f"expected {RUN_FORMAT}")
    return problem


def test_a_directory_of_this_format_is_accepted(tmp_path: Path) -> None:
    write_run_format(tmp_path)
    refuse_other_formats(tmp_path)
    assert json.loads((tmp_path / FORMAT_FILE).read_text()) == {"run_format": RUN_FORMAT}


def no_run(path: Path) -> Problem:
    with pytest.raises(ConfigError) as caught:
        refuse_no_run(path)
    (problem,) = caught.value.problems
    assert "format version" not in str(problem)
    return problem


def test_a_path_that_does_not_exist_is_not_taken_for_an_older_run(tmp_path: Path) -> None:
    write_run_format_in(tmp_path / "quickstart")
    problem = no_run(tmp_path / "quikstart")
    assert problem.message == f"{tmp_path}/quikstart does not exist"
    assert problem.remedy == f"did you mean {tmp_path}/quickstart?"


def write_run_format_in(folder: Path) -> None:
    folder.mkdir()
    write_run_format(folder)


@pytest.mark.parametrize("given", [".", "a/model", "a/summary.json"])
def test_a_path_that_is_not_a_run_directory_is_refused_with_the_runs_near_it(
    tmp_path: Path, given: str
) -> None:
    write_run_format_in(tmp_path / "a")
    (tmp_path / "a" / "model").mkdir()
    (tmp_path / "a" / "summary.json").write_text("{}")
    problem = no_run(tmp_path / given)
    assert "is not a run directory: it has neither run.json nor config.yaml" in problem.message
    assert problem.remedy == f"did you mean {tmp_path}/a?"


def test_an_older_run_is_refused_by_its_format(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="found no format version"):
        refuse_no_run(tmp_path)


def test_a_directory_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    problem = refused(tmp_path)
    assert "found no format version, as in runs of earlier versions" in problem.message
    assert "the version of async_opd that made the run" in problem.remedy


@pytest.mark.parametrize(
    ("version", "remedy"), [(RUN_FORMAT - 1, "use the version"), (RUN_FORMAT + 1, "update")]
)
def test_another_format_is_refused_with_its_version(
    tmp_path: Path, version: int, remedy: str
) -> None:
    (tmp_path / FORMAT_FILE).write_text(json.dumps({"run_format": version}))
    problem = refused(tmp_path)
    assert f"found {version}, expected {RUN_FORMAT}" in problem.message
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run_format": true}', '"run_format"'])
def test_a_file_that_is_not_what_a_run_writes_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FORMAT_FILE).write_text(text)
    assert "found no format version" in refused(tmp_path).message


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"run_format": RUN_FORMAT}))
    (tmp_path / FORMAT_FILE).symlink_to("other.json")
    assert "is a symbolic link" in refused(tmp_path).message
