"""Verdicts, scores and suggestions, each for the figures that lead to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_opd.tools.probe.figures import Estimate, PairFigures, Start, Template, figures_of
from async_opd.tools.probe.verdict import Judgement, score_of, verdicts
from tests.tools.probe.pairs import measured, response, softmax

TEACHER, STUDENT = softmax([[3, 1, 0, 0, 0, 0]] * 3), softmax([[1, 0, 0, 0, 0, 0]] * 3)


def figures(**changes: Any) -> PairFigures:
    """A teacher that is 30 % better, within the student's reach."""
    found = figures_of(measured([response(TEACHER, STUDENT)]))
    return replace(found, **{"headroom": Estimate(0.3, 0.02), **changes})


def verdict(**changes: Any) -> Judgement:
    (found,) = verdicts([figures(**changes)])
    return found


FOREIGN = {"start": Start(7, 0.9, 0.001), "first_gap": 5.0, "later_gap": 0.5}
UNGRADED = {"headroom": None}


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "will_teach", "will teach: the teacher is better (+30.0% ± 2.0%)"),
        ({"headroom": Estimate(0.05, 0.03)}, "unclear", "is not known (+5.0% ± 3.0%)"),
        ({"headroom": Estimate(-0.05, 0.03)}, "unclear", "ask more prompts"),
        ({"headroom": Estimate(0.01, 0.03)}, "equal", "nothing to gain"),
        ({"headroom": Estimate(0, 0)}, "equal", ""),
        ({"headroom": Estimate(-0.3, 0.02)}, "worse", ""),
        ({"reach": 0.3}, "nothing_to_reach", "30% of its mass"),
        ({"template": Template(Estimate(0.2, 0.03), None)}, "wrong_template", "+20.0% ± 3.0%"),
        (
            {"template": Template(Estimate(0.0, 0.01), Estimate(0.287, 0.01))},
            "wrong_template",
            "+0.29 ± 0.01 nats a token",
        ),
        ({"template": Template(Estimate(0.05, 0.03), Estimate(0.05, 0.001))}, "will_teach", ""),
        (FOREIGN, "wrong_template", "begins 90% of its responses with token 7, the student 0.1%"),
        (FOREIGN | {"start": Start(7, 0.3, 0.001)}, "will_teach", ""),
        (FOREIGN | {"start": Start(7, 0.9, 0.2)}, "will_teach", ""),
        (FOREIGN | {"later_gap": 4.5}, "will_teach", ""),
        (UNGRADED, "will_teach", "without a grader the better model is not known"),
        (UNGRADED | {"forward": 1e-6}, "equal", ""),
        (UNGRADED | {"reach": 0.1}, "nothing_to_reach", ""),
    ],
)
def test_each_pair_has_its_verdict(changes: dict[str, Any], kind: str, words: str) -> None:
    found = verdict(**changes)
    assert (found.kind, words in found.words) == (kind, True)
    assert (found.suggestion.weight is None) == (
        kind in ("unclear", "equal", "worse", "wrong_template")
    )


def test_one_prompt_decides_nothing() -> None:
    one = figures_of(measured([response(TEACHER, STUDENT)], [0.0], [1.0]))
    (found,) = verdicts([one])
    assert found.kind == "unclear"
    assert "not known (+100.0% ± 100.0%), ask more prompts" in found.words


def test_the_score_is_the_headroom_of_a_better_teacher_times_what_of_it_is_reached() -> None:
    assert score_of(figures(reach=0.5)) == pytest.approx(0.15)
    assert score_of(figures(headroom=Estimate(-0.3, 0.02), reach=0.5)) == pytest.approx(-0.3)


def test_without_grades_there_is_no_score() -> None:
    assert verdict(headroom=None).score is None


def test_weights_balance_the_gaps_of_the_teachers_that_teach() -> None:
    large, small = figures(forward=0.4), figures(forward=0.1)
    worse = figures(forward=9.0, headroom=Estimate(-0.5, 0.01))
    found = [one.suggestion.weight for one in verdicts([large, small, worse])]
    assert found == [0.5, 2.0, None]


def test_reverse_kl_is_suggested_where_the_student_has_all_modes_of_a_broader_teacher() -> None:
    assert verdict(reach=0.99, forward=1.0, reverse=0.3).suggestion.objective == "reverse_kl"
    assert verdict(reach=0.80, forward=1.0, reverse=0.3).suggestion.objective == "forward_kl"
    assert verdict(reach=0.99, forward=1.0, reverse=0.9).suggestion.objective == "forward_kl"


def test_a_teacher_that_is_the_student_itself_is_equal() -> None:
    same = figures_of(measured([response(TEACHER, TEACHER)], [0, 1], [0, 1]))
    assert same.forward == pytest.approx(0, abs=1e-6)
    assert verdicts([same])[0].kind == "equal"
    assert np.isfinite(verdicts([same])[0].score or 0)
