"""A rollout's uid is made of its prompt's, and names it again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.uid import Uid, member_of, prompt_uid, rollout_uid


@given(prompt=st.text(), member=st.integers(0, 10**6))
def test_a_rollouts_uid_names_its_prompt_and_its_place_in_the_group(
    prompt: str, member: int
) -> None:
    uid = rollout_uid(Uid(prompt), member)
    assert (prompt_uid(uid), member_of(uid)) == (prompt, member)


def test_a_prompts_uid_has_no_place_in_a_group() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        member_of(Uid("0:0#0"))
