"""Figures of a pair: accuracies, gaps by position, starts, templates, the floor."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from async_opd.tools.doctor.distances import Float64
from async_opd.tools.probe.figures import LEAST_TOP_K, Estimate, figures_of
from tests.tools.probe.pairs import measured, response, softmax

FLAT = softmax([[0] * 6] * 4)
SHARP = softmax([[9, 0, 0, 0, 0, 0]] * 4)


def test_an_estimate_has_the_standard_error_of_its_mean() -> None:
    found = Estimate.of([0.0, 1.0, math.nan, 1.0, 0.0])
    assert found is not None
    assert found.mean == 0.5
    assert found.stderr == pytest.approx(np.std([0, 1, 1, 0], ddof=1) / 2)


def test_one_value_is_as_uncertain_as_it_is_large() -> None:
    found = Estimate.of([-0.5])
    assert found == Estimate(-0.5, 0.5)
    assert not Estimate(0.5, 0.5).exceeds(0.02, 2)


def test_without_grades_there_is_no_accuracy_and_no_headroom() -> None:
    nan = [math.nan, math.nan]
    found = figures_of(measured([response(FLAT, SHARP)], nan, nan))
    assert found.student_accuracy is None
    assert found.headroom is None
    assert found.bias is None


def test_the_headrooms_error_is_that_of_paired_prompts() -> None:
    found = figures_of(measured([response(FLAT, SHARP)], [0, 1, 0, 1], [1, 2, 1, 2]))
    assert found.headroom == Estimate(1.0, 0.0)


def test_gaps_are_listed_for_positions_that_double() -> None:
    responses = [response(FLAT, SHARP), response(FLAT[:1], SHARP[:1])]
    found = figures_of(measured(responses)).by_position
    assert [(one.first, one.last, one.tokens) for one in found] == [(0, 0, 2), (1, 1, 1), (2, 3, 2)]
    assert all(one.forward == pytest.approx(found[0].forward) for one in found)


def test_the_first_gap_is_apart_from_later_ones() -> None:
    teacher = np.vstack([softmax([[0, 9, 0, 0, 0, 0]]), SHARP[1:]])
    found = figures_of(measured([response(teacher, SHARP)]))
    assert found.first_gap > 5
    assert found.later_gap == pytest.approx(0, abs=1e-6)


def test_the_token_that_the_teacher_most_expects_first_is_found_over_all_prompts() -> None:
    sevens = softmax([[0, 9, 0, 0, 0, 0]])
    found = figures_of(measured([response(sevens, FLAT[:1]), response(FLAT[:1], FLAT[:1])]))
    assert found.start.token == 1
    assert found.start.teacher == pytest.approx((sevens[0, 1] + 1 / 6) / 2, rel=1e-4)
    assert found.start.student == pytest.approx(1 / 6, rel=1e-4)


def test_bias_is_the_gap_of_right_responses_alone() -> None:
    right, wrong = response(FLAT, SHARP, 1.0), response(SHARP, SHARP, 0.0)
    found = figures_of(measured([right, wrong])).bias
    assert found is not None
    assert found.mean == pytest.approx(math.log(6) + math.log(SHARP[0, 0]), rel=1e-4)


def test_the_template_adds_accuracy_and_likelihood_of_the_students_right_responses() -> None:
    responses = [response(FLAT, SHARP, 1.0, other=SHARP), response(FLAT, SHARP, 0.0, other=FLAT)]
    grades = np.array([1.0, 1.0])
    found = figures_of(measured(responses, [0, 0], [0, 0], other_grades=grades)).template
    assert found is not None
    assert found.accuracy == Estimate(1.0, 0.0)
    assert found.logprob is not None
    assert found.logprob.mean == pytest.approx(math.log(6) + math.log(SHARP[0, 0]), rel=1e-4)


def test_without_another_template_it_is_not_reported() -> None:
    assert figures_of(measured([response(FLAT, SHARP)])).template is None


def test_the_floor_is_what_the_student_scores_against_what_it_sampled() -> None:
    one = response(FLAT, SHARP)
    off = replace(one, rollout_logprobs=one.rollout_logprobs + np.float32(0.25))
    found = figures_of(measured([off])).floor
    assert found.bias == pytest.approx(0.25)
    assert found.tokens == 4


def test_the_suggested_k_has_nearly_all_mass_at_nearly_all_positions() -> None:
    wide = softmax([[0.0] * 32])
    sharp = softmax([[9.0] + [-9.0] * 31])
    spread = softmax([[5.0] * 12 + [-9.0] * 20])

    def top_k(*rows: Float64) -> int:
        teacher = np.vstack(rows)
        return figures_of(measured([response(teacher, teacher, k=32)])).top_k

    assert top_k(*[sharp] * 9) == LEAST_TOP_K
    assert top_k(*[sharp] * 9, spread) == 16
    assert top_k(*[sharp] * 200, spread) == LEAST_TOP_K
    assert top_k(wide) == 32


def test_a_teachers_own_answers_say_how_sure_it_begins() -> None:
    own = [np.array([-3.0, -1.0, -1.0], np.float32), np.array([-1.0], np.float32)]
    found = figures_of(measured([response(FLAT, SHARP)], own=own))
    assert found.own_start == -2
    assert found.own_later == -1


def test_tokens_that_the_teacher_excludes_leave_all_figures_finite() -> None:
    excluded = np.array([-np.inf, -1.0, -1.0, -1.0], np.float32)
    one = response(FLAT, SHARP, 1.0, other=SHARP)
    one = replace(one, teacher=replace(one.teacher, sampled_logprobs=excluded), other=excluded)
    grades = np.array([1.0, 1.0])
    found = figures_of(measured([one], [0, 0], [0, 0], own=[excluded], other_grades=grades))
    json.dumps(asdict(found), allow_nan=False)


def test_empty_responses_have_no_figures() -> None:
    with pytest.raises(ValueError, match="0 responses with tokens"):
        figures_of(measured([response(FLAT[:0], SHARP[:0])]))
