"""A dict that forgets what was set longest ago."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.bounded import BoundedDict


@given(most=st.integers(1, 5), keys=st.lists(st.integers(0, 8), max_size=40))
def test_the_keys_that_were_set_last_are_held_from_the_oldest_to_the_newest(
    most: int, keys: list[int]
) -> None:
    held: BoundedDict[int, int] = BoundedDict(most)
    for number, key in enumerate(keys):
        held[key] = number
    last = {key: number for number, key in enumerate(keys)}  # by the last time it was set
    wanted = sorted(last.items(), key=lambda entry: entry[1])[-most:]
    assert list(held.items()) == wanted


def test_an_update_is_bounded_too() -> None:
    held: BoundedDict[str, None] = BoundedDict(2)
    held.update((key, None) for key in "abc")
    assert list(held) == ["b", "c"]


def test_a_key_that_is_read_is_no_newer() -> None:
    held: BoundedDict[str, int] = BoundedDict(2)
    held["a"], held["b"] = 1, 2
    assert (held["a"], held.get("a")) == (1, 1)
    held["c"] = 3
    assert "a" not in held


def test_a_dict_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0"):
        BoundedDict(0)
