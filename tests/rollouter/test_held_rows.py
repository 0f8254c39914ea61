"""Seats of an engine for held rows."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("given", "seats"),
    [
        ({"max_num_seqs": 64}, 69),
        ({"max_num_seqs": 1}, 1),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 66}, 66),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8192}, 69),
    ],
)
def test_held_rows_have_seats_of_their_own_where_vllm_takes_so_many(
    given: dict[str, Any], seats: int
) -> None:
    """vLLM refuses more seats than tokens of a step; one seat keeps a response's batch its own."""
    from rollouter.held_rows import with_seats

    assert with_seats(given)["max_num_seqs"] == seats
