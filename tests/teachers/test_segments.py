"""Segments are scored one by one, and their scores come back as those of one rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import RolloutFault
from async_opd.core.row import Media
from async_opd.core.samples import Rollout
from async_opd.core.scores import HiddenStates, SampledLogprobs, Scores, TopK
from teachers.segments import by_segment, joined, score_segments
from tests.conftest import make_rollout
from tests.sequences import Parts, parts, sequence, views

KINDS = {
    "sampled": lambda values: SampledLogprobs(values),
    "hidden": lambda values: HiddenStates(np.stack([values] * 2, 1), "float32"),
    "teacher_topk": lambda values: TopK(
        np.zeros((len(values), 1), np.int32), values[:, None], values, None
    ),
}


@given(parts())
def test_segments_are_rollouts_with_all_that_was_sampled_in_them(after: Parts) -> None:
    rollout = sequence("p/0", after, top_k=2, media=False)
    found = by_segment(rollout)
    for name in ("token_ids", "response_ids", "rollout_logprobs", "topk_ids"):
        together = np.concatenate([getattr(one, name) for one in found])
        np.testing.assert_array_equal(together, getattr(rollout, name))
    assert [one.tokens for one in found] == [end - start for start, end in rollout.segments]
    versions = [[v.version] * (v.end - v.start) for r in [rollout, *found] for v in r.version_spans]
    flat = [version for one in versions for version in one]
    assert flat[: len(flat) // 2] == flat[len(flat) // 2 :]


def test_a_rollout_of_one_segment_is_itself() -> None:
    rollout = make_rollout()
    assert by_segment(rollout)[0] is rollout
    scores = SampledLogprobs(rollout.rollout_logprobs)
    assert joined([scores]) is scores


@given(st.data(), parts(), st.sampled_from(sorted(KINDS)))
async def test_scores_are_joined_in_the_order_of_the_sampled_tokens(
    data: Any, after: Parts, kind: str
) -> None:
    rollout = sequence("p/0", after, media=False)
    rollout = replace(rollout, view=data.draw(views(rollout)))
    seen: list[Rollout] = []

    async def score(segment: Rollout) -> Scores:
        seen.append(segment)
        return KINDS[kind](segment.response_ids.astype(np.float32))

    found = vars(await score_segments("t", rollout, score))
    expected = vars(KINDS[kind](rollout.response_ids.astype(np.float32)))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert [len(one.segments) for one in seen] == [1] * len(rollout.for_teacher.segments)


async def test_an_image_of_a_tool_is_refused_with_the_uid_and_a_remedy() -> None:
    async def never(segment: Rollout) -> Scores:
        raise AssertionError(segment)

    rollout = replace(make_rollout("p/3"), media=(Media("a" * 64, 3, 8, 8),))
    with pytest.raises(RolloutFault, match="rollout p/3 has 1 images after its prompt") as caught:
        await score_segments("math", rollout, never)
    assert "let no tool answer with images" in str(caught.value)
