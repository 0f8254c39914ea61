"""mean@n, pass@k and maj@n against their definitions, counted out over all subsets."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.grading.accuracy import drawn, majority, measures, metric_names, pass_at_k
from async_opd.grading.graders import Grade

scores = st.sampled_from([0.0, 0.25, 0.5, 1.0])
grades = st.lists(
    st.builds(Grade, scores, st.sampled_from([None, "a", "b", "c"])), min_size=1, max_size=7
)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_correct_subsets(
    correct: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(correct)))
    share = fmean(any(subset) for subset in itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(share, rel=1e-14, abs=1e-14)


@pytest.mark.parametrize(
    ("n", "correct", "k", "found"),
    [
        (8, 0, 4, 0.0),
        (8, 8, 1, 1.0),
        (8, 3, 1, 3 / 8),
        (8, 5, 4, 1.0),
        (8, 1, 8, 1.0),
        (2000, 1, 1000, 0.5),  # not rounded to one
    ],
)
def test_pass_at_k_in_its_limits(n: int, correct: int, k: int, found: float) -> None:
    assert pass_at_k(n, correct, k) == found


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_of_impossible_counts_is_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} answers"):
        pass_at_k(n, correct, k)


@given(grades)
def test_the_majority_is_one_of_the_answers_with_the_most_votes(own: list[Grade]) -> None:
    """Drawn among all orders of the votes: the first answer to reach the maximum wins."""
    voters = [grade for grade in own if grade.answer is not None]
    if not voters:
        assert majority(own) is None
        return
    most = max(sum(one.answer == other.answer for other in voters) for one in voters)
    winners = {
        one.answer for one in voters if sum(one.answer == other.answer for other in voters) == most
    }
    means = [fmean(float(one) for one in voters if one.answer == winner) for winner in winners]
    assert majority(own) == pytest.approx(fmean(means))


@given(st.lists(st.tuples(scores, scores), min_size=2, max_size=6))
def test_the_mean_and_its_standard_error_are_over_prompts(pairs: list[tuple[float, float]]) -> None:
    found = measures([[Grade(a), Grade(b)] for a, b in pairs], 2, 1.0)
    means = [(a + b) / 2 for a, b in pairs]
    assert found["mean@2"] == found["accuracy"] == pytest.approx(fmean(means))
    assert found["mean@2_stderr"] == pytest.approx(stdev(means) / math.sqrt(len(means)))


@given(st.lists(grades, min_size=1, max_size=4))
def test_all_metrics_have_known_names_and_lie_between_0_and_1(prompts: list[list[Grade]]) -> None:
    found = measures(prompts, 7, 0.5)
    assert set(found) <= set(metric_names(7))
    assert all(0 <= value <= 1 for value in found.values())


RIGHT, WRONG = Grade(1.0), Grade(0.0)


@pytest.mark.parametrize(
    ("prompts", "correct_from", "found"),
    [
        ([[RIGHT]], 1.0, {"accuracy": 1.0, "mean@1": 1.0, "pass@1": 1.0, "mean@1_stderr": None}),
        ([[RIGHT, WRONG], [WRONG]], 1.0, {"pass@1": 0.25, "pass@2": 1.0}),
        ([[Grade(0.5), WRONG]], 0.5, {"pass@2": 1.0}),
        ([[Grade(0.5), WRONG]], 0.6, {"pass@2": 0.0}),
        ([[Grade(1.0, "3")]], 1.0, {"maj@1": None}),
        ([[RIGHT, WRONG]], 1.0, {"maj@2": None}),
        ([[Grade(1.0, "3"), Grade(1.0, "3"), Grade(0.0, "4")]], 1.0, {"maj@3": 1}),
        (
            [[Grade(1.0, "3"), WRONG, WRONG, WRONG], *[[WRONG] * 4] * 3],
            1.0,
            {"maj@4": 0.25, "maj@4_stderr": 0.25},
        ),
    ],
    ids=[
        "one prompt has no standard error",
        "too few graded answers are in no pass@k",
        "correct from a score on",
        "not correct below it",
        "a majority needs several answers",
        "and a grader that extracts them",
        "the majority",
        "prompts without a vote are wrong where the grader extracts answers",
    ],
)
def test_measures_in_their_limits(
    prompts: list[list[Grade]], correct_from: float, found: dict[str, float | None]
) -> None:
    measured = measures(prompts, max(map(len, prompts)), correct_from)
    assert {key: measured.get(key) for key in found} == found


def test_pass_at_k_is_given_for_powers_of_two_and_for_all_answers() -> None:
    assert [drawn(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
