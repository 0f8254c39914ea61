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


def test_a_better_teacher_within_reach_will_teach() -> None:
    found = verdict()
    assert found.kind == "will_teach"
    assert found.words == "will teach: the teacher is better (+30.0% ± 2.0%)"


@pytest.mark.parametrize("headroom", [Estimate(0.05, 0.03), Estimate(-0.05, 0.03)])
def test_a_difference_within_two_standard_errors_is_unclear(headroom: Estimate) -> None:
    found = verdict(headroom=headroom)
    assert found.kind == "unclear"
    assert found.suggestion.weight is None


def test_no_difference_is_equal() -> None:
    assert verdict(headroom=Estimate(0, 0)).kind == "equal"


def test_one_prompt_decides_nothing() -> None:
    one = figures_of(measured([response(TEACHER, STUDENT)], [0.0], [1.0]))
    (found,) = verdicts([one])
    assert found.kind == "unclear"
    assert "not known (+100.0% ± 100.0%), ask more prompts" in found.words


def test_equal_models_differ_by_little_and_others_need_more_prompts() -> None:
    assert "nothing to gain" in verdict(headroom=Estimate(0.01, 0.03)).words
    assert "ask more prompts" in verdict(headroom=Estimate(-0.05, 0.03)).words


def test_a_worse_teacher_is_left_out() -> None:
    found = verdict(headroom=Estimate(-0.3, 0.02))
    assert found.kind == "worse"
    assert found.suggestion.weight is None


def test_a_better_teacher_whose_mass_the_student_lacks_has_nothing_to_reach() -> None:
    found = verdict(reach=0.3)
    assert found.kind == "nothing_to_reach"
    assert "30% of its mass" in found.words


def test_a_teacher_that_answers_better_with_its_own_template_reads_the_wrong_one() -> None:
    found = verdict(template=Template(Estimate(0.2, 0.03), None))
    assert found.kind == "wrong_template"
    assert "+20.0% ± 3.0%" in found.words


def test_a_teacher_that_expects_the_right_answers_more_with_its_own_template_too() -> None:
    template = Template(Estimate(0.0, 0.01), Estimate(0.287, 0.01))
    assert "+0.29 ± 0.01 nats a token" in verdict(template=template).words


def test_a_template_that_changes_little_is_not_wrong() -> None:
    template = Template(Estimate(0.05, 0.03), Estimate(0.05, 0.001))
    assert verdict(template=template).kind == "will_teach"


FOREIGN = {"start": Start(7, 0.9, 0.001), "first_gap": 5.0, "later_gap": 0.5}


def test_a_beginning_that_the_student_seldom_has_looks_like_another_template() -> None:
    found = verdict(**FOREIGN)
    assert found.kind == "wrong_template"
    assert "begins 90% of its responses with token 7, the student 0.1%" in found.words


@pytest.mark.parametrize(
    "change",
    [{"start": Start(7, 0.3, 0.001)}, {"start": Start(7, 0.9, 0.2)}, {"later_gap": 4.5}],
)
def test_a_beginning_is_foreign_only_if_one_token_causes_the_gap(change: dict[str, Any]) -> None:
    assert verdict(**{**FOREIGN, **change}).kind == "will_teach"


def test_the_score_is_the_headroom_of_a_better_teacher_times_what_of_it_is_reached() -> None:
    assert score_of(figures(reach=0.5)) == pytest.approx(0.15)
    assert score_of(figures(headroom=Estimate(-0.3, 0.02), reach=0.5)) == pytest.approx(-0.3)


def test_without_grades_there_is_no_score_and_the_words_say_so() -> None:
    found = verdict(headroom=None)
    assert found.score is None
    assert found.kind == "will_teach"
    assert "without a grader the better model is not known" in found.words


def test_without_grades_a_gap_below_the_floor_is_equal() -> None:
    assert verdict(headroom=None, forward=1e-6).kind == "equal"


def test_without_grades_a_student_without_the_teachers_mass_has_nothing_to_reach() -> None:
    assert verdict(headroom=None, reach=0.1).kind == "nothing_to_reach"


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
