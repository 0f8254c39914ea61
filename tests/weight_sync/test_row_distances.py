"""The distance of a replica, by kind of rows, and the limits that the first comparison sets."""

from __future__ import annotations

import math

import pytest

from async_opd.weight_sync.freshness import FIRST_RATIO, MARGIN, Distance, RowLimits


@pytest.mark.parametrize(("nats", "ratio"), [(0.0, 0.0), (1e-9, math.inf)])
def test_where_rounding_changes_nothing_any_difference_is_infinitely_many_roundings(
    nats: float, ratio: float
) -> None:
    assert Distance(nats, 0.0).ratio == ratio


def test_a_kind_that_was_not_compared_has_the_limit_of_a_first_comparison() -> None:
    limits = RowLimits()
    limits.learn([{"text": Distance(2.0, 1.0)}])
    assert (limits.of("text"), limits.of("image")) == (2 * MARGIN, FIRST_RATIO)


def test_the_nearest_replica_sets_the_limit_and_later_ones_do_not_move_it() -> None:
    limits = RowLimits()
    limits.learn([{"text": Distance(3.0, 1.0)}, {"text": Distance(2.0, 1.0)}])
    limits.learn([{"text": Distance(1.0, 1.0)}])
    assert limits.of("text") == 2 * MARGIN


def test_a_first_comparison_beyond_any_rounding_sets_no_limit() -> None:
    limits = RowLimits()
    limits.learn([{"text": Distance(math.inf, 1.0)}])
    assert limits.of("text") == FIRST_RATIO


def test_the_share_of_a_replica_is_that_of_its_worst_kind_of_rows() -> None:
    limits = RowLimits()
    limits.learn([{"text": Distance(1.0, 1.0), "image": Distance(2.0, 1.0)}])
    found = {"text": Distance(2.0, 1.0), "image": Distance(6.0, 1.0)}
    assert limits.share(found) == 6 / (2 * MARGIN)  # type: ignore[arg-type]
