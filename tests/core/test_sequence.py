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
from async_opd.core.samples import Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.sequence import Span, indices
from tests.conftest import make_prompt, make_rollout
from tests.sequences import Parts, parts, same, sampled_positions, sequence
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
