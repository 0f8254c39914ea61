"""Differences of log-probabilities that two places computed for the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from async_opd.tools.doctor.agreement import Agreement

ROWS = arrays(np.float32, 5, elements=st.floats(-20, 0, width=32))


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
