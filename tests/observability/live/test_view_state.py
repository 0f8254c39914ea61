"""Sparklines and bars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.observability.live.view_state import BLOCKS, MAX_MEANS, Curve, bar, sparkline

values = st.floats(allow_nan=True, allow_infinity=True)


def test_the_lowest_value_has_the_lowest_block_and_the_highest_the_highest() -> None:
    assert sparkline([0, 7, 3], 10) == "▁█▄"
    assert sparkline([0, 2, 14, 16], 2) == "▁█"  # means of neighbours


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.integers(0, 30))
def test_a_sparkline_is_as_wide_as_it_may_be_and_as_it_has_values(
    given_values: list[float], width: int
) -> None:
    found = sparkline(given_values, width)
    assert len(found) == min(len(given_values), width)
    assert set(found) <= set(BLOCKS)


@given(st.lists(values, max_size=3 * MAX_MEANS))
def test_a_curve_is_bounded_and_finite_whatever_it_is_given(given_values: list[float]) -> None:
    curve = Curve()
    for value in given_values:
        curve.add(value)
    assert len(curve.means) <= MAX_MEANS
    assert len(sparkline(curve.means, 20)) <= 20


def test_a_curve_of_many_values_keeps_their_course() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step)
    assert curve.means == sorted(curve.means)
    assert sparkline(curve.means, 8) == BLOCKS


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, "    "), (1e-9, "▏   "), (0.5, "██  "), (1, "████"), (7, "████"), (None, "    ")],
)
def test_a_bar_is_filled_to_its_share(share: float | None, expected: str) -> None:
    assert bar(share, 4) == expected


@given(values, st.integers(0, 30))
def test_a_bar_has_its_width(share: float, width: int) -> None:
    assert len(bar(share, width)) == width
