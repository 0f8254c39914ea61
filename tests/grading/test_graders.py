"""Graders: answers in every notation, verifiers with their options, errors with a name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from async_opd.config.sections.data import DataConfig
from async_opd.core.row import Row
from async_opd.data.reasoning_gym import ReasoningGymSource
from async_opd.data.stored_rows import read_source
from async_opd.grading.graders import GradeError, load_grader


def row(answer: str) -> Row:
    return Row("0:7", "a", "p", answer, {})


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("x^2", "$x^2$"),
        ("3,4", "$\\{3,4\\}$"),
        ("1,000", "$1000$"),
        ("$5$", "5"),
        ("\\boxed{7}", "7"),
    ],
)
def test_math_verify_reads_answers_in_any_notation(answer: str, response: str) -> None:
    assert load_grader("math_verify")(response, row(answer)) == 1.0


def test_an_answer_that_is_no_mathematics_is_an_error_and_not_a_0() -> None:
    with pytest.raises(GradeError, match="row 0:7"):
        load_grader("math_verify")("3", row(""))


def test_a_grade_that_is_no_number_names_row_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nan_grader.py").write_text("def f(response, row):\n    return float('nan')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("nan_grader", None)
    with pytest.raises(GradeError, match="returned nan on row 0:7"):
        load_grader("nan_grader:f")("x", row("y"))


def test_a_verifier_knows_the_options_its_rows_were_made_with() -> None:
    options = {"min_value": 1, "max_value": 6}
    source = ReasoningGymSource(kind="reasoning_gym", task="puzzle24", size=1, options=options)
    (made,) = read_source(source, 0, DataConfig(train=[]))
    assert load_grader("exact")(str(made.answer), made) == 1.0
    assert load_grader("exact")("9 + 8 + 6 + 1", made) < 1.0  # 24, but of numbers above 6


@pytest.mark.parametrize(
    ("name", "response", "score", "found"),
    [
        ("exact", " 4 \n", 1.0, "4"),
        ("math_verify", "so it is $4$", 1.0, "4"),
        ("math_verify", "I do not know", 0.0, None),
    ],
)
def test_graders_say_which_answer_they_read(
    name: str, response: str, score: float, found: str | None
) -> None:
    grade = load_grader(name)(response, row("4"))
    assert (grade, grade.answer) == (score, found)


def test_a_users_grader_may_return_the_answer_that_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def f(response, row):\n    return 0.5, response.upper()\n"
    (tmp_path / "pair_grader.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    grade = load_grader("pair_grader:f")("x", row("y"))
    assert (grade, grade.answer) == (0.5, "X")
