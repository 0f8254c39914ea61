"""Spans of a sequence: what they must be, the tokens and rows they stand for, and their way."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import LengthError
from async_opd.core.samples import Rollout, Sample, TeacherView, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.sequence import PROMPT, Span, indices, segments_of, spans_of
from tests.conftest import make_prompt, make_rollout
from tests.sequences import Parts, parts, same, sampled_positions, sequence, views
from trainer.saving.sample_file import read_samples, write_samples

TURNS: Parts = [("student", 2), ("tool", 3), ("student", 1)]
"""Positions 3, 4 and 8 of a prompt of 3 tokens are sampled."""


@given(parts())
def test_the_response_is_the_tokens_at_the_sampled_positions(after: Parts) -> None:
    rollout = sequence("p/0", after)
    expected = rollout.token_ids[sampled_positions(rollout)]
    np.testing.assert_array_equal(rollout.response_ids, expected)


@given(parts())
def test_the_row_before_a_sampled_token_predicts_it(after: Parts) -> None:
    rollout = sequence("p/0", after)
    assert indices(rollout.rows).tolist() == [at - 1 for at in sampled_positions(rollout)]


def test_a_plain_rollout_is_its_prompt_and_one_span_of_the_student() -> None:
    rollout = make_rollout(tokens=4, prompt_tokens=3)
    assert rollout.spans == ((0, 3, "prompt"), (3, 7, "student"))
    assert rollout.token_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_the_response_of_a_plain_rollout_is_not_copied() -> None:
    rollout = make_rollout(tokens=4)
    assert np.shares_memory(rollout.response_ids, rollout.continuation)


@given(parts())
def test_the_teachers_prompt_moves_the_spans_and_changes_no_sampled_token(after: Parts) -> None:
    rollout = sequence("p/0", after, teacher_ids=True)
    seen = rollout.for_teacher
    assert seen.tokens == rollout.tokens + 2
    np.testing.assert_array_equal(seen.response_ids, rollout.response_ids)
    np.testing.assert_array_equal(indices(seen.rows), indices(rollout.rows) + 2)


# ── segments ───────────────────────────────────────────────────────────────────────────────────


@given(parts())
def test_each_prompt_begins_a_segment_and_segments_partition_the_tokens(after: Parts) -> None:
    rollout = sequence("p/0", after)
    prompts = [span.start for span in rollout.spans if span.origin == PROMPT]
    assert [start for start, _ in rollout.segments] == prompts
    assert indices(rollout.segments).tolist() == list(range(rollout.tokens))


def test_a_sequence_without_tokens_is_one_segment() -> None:
    assert segments_of(()) == ((0, 0),)


@given(parts())
def test_no_segment_begins_with_a_sampled_token(after: Parts) -> None:
    rollout = sequence("p/0", after)
    assert not {start for start, _ in rollout.segments} & set(sampled_positions(rollout))


def test_a_header_has_the_lengths_of_several_segments_only() -> None:
    assert sequence("p/0", TURNS).header(0).segments == ()
    assert sequence("p/0", [*TURNS, ("prompt", 4), ("student", 1)]).header(0).segments == (9, 5)


@pytest.mark.parametrize(("seed", "turns"), [(0, 1), (3, 3)])
def test_a_header_has_the_turns_of_its_episode_or_one(seed: int, turns: int) -> None:
    assert sequence("p/0", TURNS, seed=seed).header(0).turns == turns


# ── what a teacher reads ───────────────────────────────────────────────────────────────────────


@given(st.data(), parts())
def test_a_view_exchanges_the_context_and_no_sampled_token(data: Any, after: Parts) -> None:
    rollout = sequence("p/0", after, top_k=2, teacher_ids=True)
    view = data.draw(views(rollout))
    seen = replace(rollout, view=view).for_teacher
    np.testing.assert_array_equal(seen.token_ids, view.token_ids)
    np.testing.assert_array_equal(seen.token_ids[indices(seen.positions)], rollout.response_ids)
    assert seen.topk_ids is rollout.topk_ids


@given(st.data(), parts())
def test_a_view_pairs_each_sampled_span_with_one_of_the_same_tokens(
    data: Any, after: Parts
) -> None:
    rollout = sequence("p/0", after)
    view = data.draw(views(rollout))
    for own, seen in view.pairs(rollout):
        np.testing.assert_array_equal(rollout.token_ids[slice(*own)], view.token_ids[slice(*seen)])
        assert (*own, "student") in rollout.spans
        assert (*seen, "student") in view.spans


@given(parts())
def test_a_view_of_the_rollouts_own_tokens_is_as_none(after: Parts) -> None:
    rollout = sequence("p/0", after)
    viewed = replace(rollout, view=TeacherView(rollout.token_ids, rollout.spans))
    assert same(viewed.for_teacher, rollout.for_teacher)


def test_a_sample_has_no_view_any_more() -> None:
    rollout = sequence("p/0", TURNS)
    viewed = replace(rollout, view=TeacherView(rollout.token_ids, rollout.spans))
    assert viewed.without_teacher_inputs.view is None


BAD_VIEWS: dict[str, tuple[Parts, int, str]] = {
    "fewer spans": ([("prompt", 3), ("student", 3)], 0, "teacher's view of them"),
    "another length": (
        [("prompt", 3), ("student", 1), ("tool", 1), ("student", 2)],
        0,
        "teacher's view of them",
    ),
    "other tokens": ([("prompt", 3), *TURNS], 1, "other sampled tokens"),
    "too short": ([("prompt", 3), *TURNS[:1]], 0, "its spans end at 5"),
    "no context": ([*TURNS], 0, "first token is sampled"),
}


@pytest.mark.parametrize(("after", "change", "cause"), BAD_VIEWS.values(), ids=BAD_VIEWS)
def test_a_view_that_does_not_pair_is_refused_with_the_uid(
    after: Parts, change: int, cause: str
) -> None:
    rollout = sequence("p/7", TURNS)
    spans = spans_of(after)
    tokens = rollout.tokens if "end at" in cause else spans[-1].end
    view = TeacherView(np.resize(rollout.token_ids, tokens) + np.int32(change), spans)
    with pytest.raises(LengthError, match=f"rollout p/7: .*{cause}"):
        replace(rollout, view=view)


# ── what is refused ────────────────────────────────────────────────────────────────────────────

MALFORMED = {
    "overlap": ([(0, 3, "prompt"), (3, 5, "student"), (4, 9, "tool")], "does not begin at 5"),
    "a gap": ([(0, 3, "prompt"), (3, 5, "student"), (6, 9, "tool")], "does not begin at 5"),
    "out of order": ([(3, 9, "student"), (0, 3, "prompt")], "does not begin at 0"),
    "beyond the tokens": ([(0, 3, "prompt"), (3, 10, "student")], "ends beyond 9 tokens"),
    "too short": ([(0, 3, "prompt"), (3, 8, "student")], "end at 8, its tokens at 9"),
    "nothing": ([], "end at 0, its tokens at 9"),
    "an empty span": ([(0, 3, "prompt"), (3, 3, "tool"), (3, 9, "student")], "is empty"),
    "backwards": ([(0, 3, "prompt"), (3, 2, "tool"), (2, 9, "student")], "is empty"),
    "the first token is sampled": ([(0, 9, "student")], "first token is sampled"),
    "another prompt": ([(0, 4, "prompt"), (4, 9, "student")], "its first span is"),
    "no prompt": ([(0, 3, "user"), (3, 9, "student")], "its first span is"),
}


@pytest.mark.parametrize(("spans", "cause"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_spans_are_refused_with_the_uid_and_the_cause(
    spans: list[tuple[int, int, str]], cause: str
) -> None:
    rollout = make_rollout("p/7", tokens=6, prompt_tokens=3)
    with pytest.raises(LengthError, match=f"rollout p/7: .*{cause}"):
        replace(rollout, spans=tuple(Span(*span) for span in spans))


def test_a_response_to_an_empty_prompt_is_refused() -> None:
    array = np.zeros(2, np.float32)
    versions = (VersionSpan(0, 0, 2),)
    with pytest.raises(LengthError, match="no row predicts it"):
        Rollout.plain("p/0", make_prompt(tokens=0), array.astype(np.int32), array, versions, "stop")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"rollout_logprobs": np.zeros(6, np.float32)}, "3 response tokens but log-prob"),
        ({"topk_ids": np.zeros((6, 2), np.int32)}, "3 response tokens but a top-k"),
        ({"version_spans": (VersionSpan(0, 0, 6),)}, "do not partition 0..3"),
    ],
)
def test_arrays_must_have_one_entry_for_each_sampled_token(
    change: dict[str, Any], cause: str
) -> None:
    with pytest.raises(LengthError, match=cause):
        replace(sequence("p/0", TURNS), **change)


def test_scores_must_have_one_row_for_each_sampled_token() -> None:
    rollout = sequence("p/0", TURNS)
    Sample(rollout, SampledLogprobs(np.zeros(3, np.float32)))
    with pytest.raises(LengthError, match="3 response tokens but scores"):
        Sample(rollout, SampledLogprobs(np.zeros(6, np.float32)))


# ── on its way ─────────────────────────────────────────────────────────────────────────────────


def scored(rollout: Rollout) -> Sample:
    return Sample(rollout, SampledLogprobs(np.full(len(rollout.response_ids), -0.5, np.float32)))


@given(st.lists(st.tuples(parts(), st.integers(0, 5)), max_size=4))
def test_sequences_come_out_of_a_batch_as_they_went_in(made: list[tuple[Parts, int]]) -> None:
    rollouts = [
        sequence(f"{i}/0", after, seed=seed, top_k=2, teacher_ids=bool(seed % 2))
        for i, (after, seed) in enumerate(made)
    ]
    batch = Batch.pack(rollouts)
    assert [header.tokens for header in batch.headers] == [one.tokens for one in rollouts]
    assert all(map(same, rollouts, unpack(Rollout, [batch])))
    viewed = [replace(one, view=TeacherView(one.token_ids, one.spans)) for one in rollouts]
    assert all(map(same, viewed, unpack(Rollout, [Batch.pack(viewed)])))
    samples = [scored(rollout) for rollout in rollouts]
    assert all(map(same, samples, unpack(Sample, [Batch.pack(samples)])))


@given(st.lists(st.tuples(parts(), st.integers(0, 5)), max_size=4))
def test_sequences_come_out_of_a_checkpoint_as_they_went_in(made: list[tuple[Parts, int]]) -> None:
    samples = [
        scored(sequence(f"{i}/0", after, seed=seed, top_k=2))
        for i, (after, seed) in enumerate(made)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder) / "scored", samples)
        assert all(map(same, samples, read_samples(Path(folder) / "scored")))
