"""Restarts are counted, come later and later, and are forgotten by what was done since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.processes.restarts import Restarts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def restarts(tries: int = 3, window_s: float = 10) -> tuple[Restarts, Clock]:
    clock = Clock()
    return Restarts(
        SupervisionConfig(max_restarts=tries, window_s=window_s, delay_s=2), clock
    ), clock


def test_each_comes_later_than_the_one_before() -> None:
    made, _ = restarts(tries=4)
    assert [made.next_delay(0) for _ in range(5)] == [0, 2, 6, 14, None]


def test_what_dies_at_the_same_place_is_not_forgotten_however_long_it_takes() -> None:
    made, clock = restarts(tries=3)
    found = []
    for _ in range(4):
        found.append(made.next_delay(reached=7))
        clock.now += 1000
    assert found == [0, 2, 6, None]


def test_a_restart_is_forgotten_after_its_time_once_something_newer_was_reached() -> None:
    made, clock = restarts(tries=1)
    assert made.next_delay(reached=7) == 0
    clock.now += 11
    assert made.next_delay(reached=8) == 0


def test_too_many_in_a_short_time_are_too_many_although_each_went_further() -> None:
    made, _ = restarts(tries=2)
    assert [made.next_delay(reached) for reached in (1, 2, 3)] == [0, 2, None]


def test_what_comes_again_after_a_rewind_is_nothing_new() -> None:
    made, clock = restarts(tries=2)
    made.next_delay(reached=9)
    clock.now += 11
    made.next_delay(reached=5)
    clock.now += 11
    assert made.next_delay(reached=8) is None


@given(
    tries=st.integers(0, 4),
    deaths=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), max_size=30),
)
def test_never_more_than_tries_in_a_window_or_without_anything_new(
    tries: int, deaths: list[tuple[float, int]]
) -> None:
    made, clock = restarts(tries)
    granted: list[tuple[float, int]] = []
    reached = 0
    for seconds, done in deaths:
        clock.now += seconds
        reached += done
        if made.next_delay(reached) is not None:
            granted.append((clock.now, reached))
    for when, then in granted:
        assert sum(0 <= other - when <= 10 for other, _ in granted) <= max(tries, 1) * bool(tries)
        assert sum(place == then for _, place in granted) <= tries
