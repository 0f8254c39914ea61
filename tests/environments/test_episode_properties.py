"""Whatever happens to an episode, its tokens are trained as they were sampled, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.environments.random_episodes import lived, violations
from tests.properties import examples


@examples(260)  # of 4 to 12 episodes: 2,000 in all
@given(st.integers(0, 2**32))
@pytest.mark.slow
def test_every_token_is_trained_after_the_tokens_that_it_was_sampled_after(seed: int) -> None:
    assert [*violations(lived(seed))] == []
