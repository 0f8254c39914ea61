"""Differences of log-probabilities, and teacher and student at a position, by their top-k."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from async_opd.tools.doctor.distances import Agreement, Float64, Positions
from tests.properties import examples
from tests.tools.probe.pairs import VOCABULARY, softmax, topk

logits = st.lists(
    st.lists(st.floats(-6, 6), min_size=VOCABULARY, max_size=VOCABULARY), min_size=1, max_size=4
)
SAMPLED = [0]
ROWS = arrays(np.float32, 5, elements=st.floats(-20, 0, width=32))


def exact(p: Float64, q: Float64) -> Float64:
    return np.asarray((p * (np.log(p) - np.log(q))).sum(-1))


def compared(p: Float64, q: Float64, k: int = VOCABULARY) -> Positions:
    return Positions.of(topk(p, [0] * len(p), k), topk(q, [0] * len(q), k))


@given(st.data())
@examples(50)
def test_with_the_whole_vocabulary_the_divergences_are_exact(data: st.DataObject) -> None:
    one = data.draw(logits)
    p, q = softmax(one), softmax(np.roll(one, 2, axis=1))
    found = compared(p, q)
    assert found.forward == pytest.approx(exact(p, q), abs=1e-5)
    assert found.reverse == pytest.approx(exact(q, p), abs=1e-5)
    assert found.shared == pytest.approx(np.minimum(p, q).sum(1), abs=1e-5)
    assert found.overlap == pytest.approx(1)


@given(logits, st.integers(1, VOCABULARY - 1))
@examples(50)
def test_a_top_k_gives_lower_bounds_of_the_divergences(one: list[list[float]], k: int) -> None:
    p, q = softmax(one), softmax(np.roll(one, 1, axis=1))
    found = compared(p, q, k)
    assert (found.forward <= exact(p, q) + 1e-5).all()
    assert (found.reverse <= exact(q, p) + 1e-5).all()
    assert (found.shared >= np.minimum(p, q).sum(1) - 1e-5).all()


def test_overlap_and_reach_count_the_teachers_best_tokens_among_the_students() -> None:
    p = np.array([[0.5, 0.3, 0.1, 0.05, 0.03, 0.02]])
    q = np.array([[0.6, 0.05, 0.3, 0.02, 0.02, 0.01]])
    found = compared(p, q, k=2)  # the teacher's 0 and 1, the student's 0 and 2
    assert found.overlap.tolist() == [0.5]
    assert found.reach == pytest.approx([0.5])


def test_a_token_that_one_sample_of_a_thousand_lacks_is_not_reached() -> None:
    p = np.array([[0.5, 0.5, *[1e-12] * 4]])
    q = np.array([[0.9995, 0.0005, *[1e-12] * 4]])
    assert compared(p, q).reach == pytest.approx([0.5])


def test_models_without_a_common_token_are_as_far_apart_as_the_bound_allows() -> None:
    p, q = np.array([[1.0, *[1e-30] * 5]]), np.array([[1e-30, 1.0, *[1e-30] * 4]])
    found = compared(p, q, k=1)
    assert found.forward == pytest.approx([np.log(1e9)], rel=1e-3)
    assert found.reverse == pytest.approx([np.log(1e9)], rel=1e-3)
    assert found.shared == pytest.approx([0])


def test_a_server_that_sends_no_rest_has_one_minus_the_sum() -> None:
    p, q = softmax([[3, 2, 1, 0, 0, 0]]), softmax([[0, 1, 2, 3, 0, 0]])
    teacher, student = topk(p, SAMPLED, 3), topk(q, SAMPLED, 3)
    whole = Positions.of(teacher, student)
    served = Positions.of(replace(teacher, rest_logprobs=None), student)
    assert served.forward == pytest.approx(whole.forward, abs=1e-5)


def test_scores_of_other_lengths_are_refused() -> None:
    p = softmax([[0] * VOCABULARY])
    with pytest.raises(ValueError, match="2 positions and 1"):
        Positions.of(topk(np.vstack([p, p]), [0, 0]), topk(p, [0]))


def test_mean_and_largest_are_absolute_and_the_bias_is_signed() -> None:
    one = [np.array([-1.0, -2.0], np.float32), np.array([-4.0], np.float32)]
    other = [np.array([-1.5, -1.0], np.float32), np.array([-4.0], np.float32)]
    found = Agreement.of(one, other)
    assert (found.tokens, found.mean, found.largest) == (3, 0.5, 1.0)
    assert found.bias == pytest.approx(-0.5 / 3)


def test_a_token_that_both_exclude_is_equal_and_one_that_one_excludes_is_infinitely_far() -> None:
    excluded, possible = np.array([-np.inf], np.float32), np.array([-1.0], np.float32)
    assert Agreement.of([excluded], [excluded]).mean == 0.0
    assert Agreement.of([excluded], [possible]).mean == np.inf


def test_nothing_to_compare_is_no_difference() -> None:
    assert Agreement.of([], []) == Agreement(0, 0.0, 0.0, 0.0)


def test_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2"):
        Agreement.of([np.zeros(2, np.float32)], [np.zeros(3, np.float32)])


@given(ROWS, ROWS)
def test_the_order_changes_the_sign_of_the_bias_only(
    one: np.ndarray[tuple[int], np.dtype[np.float32]],
    other: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> None:
    found, back = Agreement.of([one], [other]), Agreement.of([other], [one])
    assert (found.mean, found.largest, found.bias) == (back.mean, back.largest, -back.bias)
    assert abs(found.bias) <= found.mean <= found.largest or np.isclose(found.mean, found.largest)
