"""Environments that cannot be played are refused before an engine starts, with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.core.errors import Problem
from tests.checks.inputs import EXAMPLE, pictured_row, rows
from tests.world.environments import WORLD

TOOLS = Path(EXAMPLE).parent / "tools.yaml"
"""Its student's template shows tools."""


def found(*overrides: str, load: bool = False) -> list[Problem]:
    return preflight(load_config(TOOLS, list(overrides)), "c.yaml", 0, load).problems


def one(*overrides: str, load: bool = False) -> Problem:
    (problem,) = found(*overrides, load=load)
    return problem


def of_class(name: str, more: str = "") -> str:
    return f"environment={{kind: class, factory: '{WORLD}:{name}'{more}}}"


def test_a_class_that_plays_is_no_problem() -> None:
    assert found(of_class("Counter"), load=True) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [("WithoutReset", "has no method reset"), ("WithoutHints", "type hint"), ("Nope", "'Nope'")],
)
@pytest.mark.slow
def test_a_class_that_cannot_be_loaded_is_refused(name: str, words: str) -> None:
    problem = one(of_class(name), load=True)
    assert problem.key == "environment"
    assert words in problem.message
    assert problem.remedy


@pytest.mark.slow
def test_a_reset_that_hangs_at_the_first_row_is_refused(tmp_path: Path) -> None:
    entry = {"prompt": "a", "data_source": "sort", "answer": "b", "then": "hang"}
    data = rows(tmp_path, entry, {**entry, "data_source": "reverse"})
    problem = one(data, of_class("Counter", ", timeouts: {reset_s: 0.5}"), load=True)
    assert "reset took longer than 0.5 s" in problem.message
    assert "environment.timeouts.reset_s" in problem.remedy


def test_without_loading_code_its_names_are_looked_for() -> None:
    assert found(of_class("Counter")) == []
    problem = one("environment={kind: tools, tools: ['nowhere:f']}")
    assert (problem.key, "nowhere" in problem.message) == ("environment", True)


@pytest.mark.parametrize(("module", "problems"), [("nowhere.at", 1), ("tests.world", 0)])
def test_without_loading_code_the_module_of_an_id_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, module: str, problems: int
) -> None:
    known = {"gymnasium", "tests"}
    monkeypatch.setattr("async_opd.checks.user_code.find_spec", lambda name: name in known or None)
    given = found(f"environment={{kind: gymnasium, id: '{module}:A-v0'}}")
    assert sum(one.key == "environment.id" for one in given) == problems


def test_gymnasium_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_opd.checks.user_code.find_spec", lambda name: None)
    problem = one("environment={kind: gymnasium, id: FrozenLake-v1}")
    assert problem.key == "environment.kind"
    assert "async-opd[environments]" in problem.remedy


def test_rows_with_images_are_refused(tmp_path: Path) -> None:
    data = rows(tmp_path, pictured_row())
    problems = found(data, of_class("Counter"))
    assert any("episodes of several turns are of text" in one.message for one in problems)
