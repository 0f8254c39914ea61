"""The rows that trainer and engines compute to be compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.row import Media
from async_opd.weight_sync.layout import HeldRow, held_rows


@given(vocabulary=st.integers(2, 200_000), longest=st.integers(2, 4096))
def test_they_are_tokens_of_the_model_and_fit_the_engine(vocabulary: int, longest: int) -> None:
    rows = [row.ids for row in held_rows(vocabulary, longest)]
    assert all(2 <= len(ids) <= max(longest, 2) for ids in rows)
    assert all(0 <= ids.min() <= ids.max() < vocabulary for ids in rows)


@pytest.mark.parametrize("vocabulary", [1_000, 151_936])
def test_every_sixteenth_of_the_vocabulary_has_tokens_in_them(vocabulary: int) -> None:
    ids = np.concatenate([row.ids for row in held_rows(vocabulary, 128)])
    assert set(ids * 16 // vocabulary) == set(range(16))


def test_all_tokens_but_the_first_are_compared() -> None:
    assert all(row.compared == len(row.ids) - 1 for row in held_rows(100, 128))


@given(without=st.sets(st.integers(0, 19), max_size=19))
def test_excluded_tokens_are_not_in_them_and_all_others_stay(without: set[int]) -> None:
    plain = np.concatenate([row.ids for row in held_rows(20, 128)])
    found = np.concatenate([row.ids for row in held_rows(20, 128, without)])
    assert not set(found.tolist()) & without
    kept = ~np.isin(plain, list(without))
    np.testing.assert_array_equal(found[kept], plain[kept])


def test_a_row_is_a_rollout_whose_response_is_compared() -> None:
    media = (Media("a" * 64, 3, 4, 5),)
    row = HeldRow(np.array([1, 9, 2, 3], np.int32), 2, media, b"png")
    rollout = row.rollout()
    assert (rollout.prompt.token_ids.tolist(), rollout.continuation.tolist()) == ([1, 9], [2, 3])
    assert rollout.prompt.media == media
    assert row.rollout(np.array([1, 9, 9, 9], np.int32)).token_ids.tolist() == [1, 9, 9, 9, 2, 3]
