"""Restarts are counted, come later and later, and are forgotten by what was done since."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.processes.members import Restarts
from tests.world.clock import ManualTimer


def restarts(tries: int = 3, window_s: float = 10) -> tuple[Restarts, ManualTimer]:
    timer = ManualTimer()
    supervision = SupervisionConfig(max_restarts=tries, window_s=window_s, delay_s=2)
    return Restarts(supervision, timer.clock), timer


@pytest.mark.parametrize(
    ("tries", "deaths", "delays"),
    [
        (4, [(0, 0)] * 5, [0, 2, 6, 14, None]),
        (3, [(1000, 7)] * 4, [0, 2, 6, None]),
        (1, [(0, 7), (11, 8)], [0, 0]),
        (2, [(0, 1), (0, 2), (0, 3)], [0, 2, None]),
        (2, [(0, 9), (11, 5), (11, 8)], [0, 2, None]),
    ],
    ids=[
        "each comes later than the one before",
        "at the same place none is forgotten however long it takes",
        "one is forgotten after its time once something newer was reached",
        "too many in a short time although each went further",
        "the same place again after a rewind is nothing new",
    ],
)
def test_delays_by_the_seconds_and_the_place_of_each_death(
    tries: int, deaths: list[tuple[float, int]], delays: list[float | None]
) -> None:
    made, timer = restarts(tries)
    found = []
    for seconds, reached in deaths:
        timer.now += seconds
        found.append(made.next_delay(reached))
    assert found == delays


@given(
    tries=st.integers(0, 4),
    deaths=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), max_size=30),
)
def test_never_more_than_tries_in_a_window_or_without_anything_new(
    tries: int, deaths: list[tuple[float, int]]
) -> None:
    made, timer = restarts(tries)
    granted: list[tuple[float, int]] = []
    reached = 0
    for seconds, done in deaths:
        timer.now += seconds
        reached += done
        if made.next_delay(reached) is not None:
            granted.append((timer.now, reached))
    for when, then in granted:
        assert sum(0 <= other - when <= 10 for other, _ in granted) <= max(tries, 1) * bool(tries)
        assert sum(place == then for _, place in granted) <= tries
