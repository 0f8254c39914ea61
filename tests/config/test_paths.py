"""Paths in configs: the home folder, variables, and what is relative to the config's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError

CONFIG = """
run_dir: ~/runs
student: {model: "${MODELS}/student"}
teachers: {a: {model: ~/teacher}}
data: {train: ["${MODELS}/a.jsonl", {path: b.jsonl}], eval: ~/c.jsonl}
eval: {grader: "graders/mine.py:score"}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", "/home/of-user")
    monkeypatch.setenv("MODELS", "/models")
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path / "c.yaml"


def test_the_home_folder_and_variables_are_filled_in(file: Path) -> None:
    config = load_config(file)
    assert config.run_dir == "/home/of-user/runs"
    assert config.student.model == "/models/student"
    assert config.teacher_model("a") == "/home/of-user/teacher"
    assert [source.label for source in config.data.train + config.data.eval] == [
        "/models/a.jsonl", f"{file.parent}/b.jsonl", "/home/of-user/c.jsonl",
    ]  # fmt: skip


def test_a_graders_file_is_relative_to_the_config(file: Path) -> None:
    assert load_config(file).eval.grader == f"{file.parent}/graders/mine.py:score"


def test_files_of_environments_are_relative_to_the_config(file: Path) -> None:
    of_class = ["environment={kind: class, factory: 'own/games.py:Game'}"]
    loaded = load_config(file, of_class).environment
    assert loaded is not None
    assert loaded.factory == f"{file.parent}/own/games.py:Game"
    of_tools = ["environment={kind: tools, tools: ['own.py:look', 'package.tools:search']}"]
    loaded = load_config(file, [*of_tools, "eval.grader=exact"]).environment
    assert loaded is not None
    assert loaded.tools == [f"{file.parent}/own.py:look", "package.tools:search"]


def test_every_variable_that_is_not_set_is_refused_with_its_key(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELS")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["student.model", "data.train[0]"]
    assert "MODELS, which is not set" in caught.value.problems[0].message


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HF_TOKEN", "hf_abcdefgh"), ("STORE", "https://user:password@host"), ("MY_API_KEY", None)],
)
def test_a_variable_with_a_secret_is_refused_in_a_path_and_its_value_is_not_shown(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"data.eval='${{{variable}}}/rows.jsonl'"])
    (problem,) = caught.value.problems
    assert (problem.key, f"names {variable}, a secret" in problem.message) == ("data.eval", True)
    assert value is None or value not in str(caught.value)
