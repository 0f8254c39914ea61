"""Batches: headers without the payload, and everything as it was packed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from async_opd.core.batch import Batch, unpack_rollouts, unpack_samples
from async_opd.core.samples import (
    HiddenStates,
    Sample,
)
from tests.conftest import make_rollout, make_sample


def test_a_batch_decodes_to_what_was_packed() -> None:
    (sample,) = unpack_samples([Batch.pack([make_sample("p/0", tokens=5)])])
    np.testing.assert_array_equal(sample.scores.logprobs, np.full(5, -0.5, np.float32))


def test_headers_are_readable_without_the_payload() -> None:
    batch = Batch.pack([make_rollout("p/0", "math", tokens=5, version=3, prompt_tokens=2)])
    (header,) = batch.headers
    assert (header.uid, header.tokens, header.oldest_version, header.teacher) == (
        "p/0",
        7,
        3,
        "math",
    )


def test_joined_batches_decode_in_order() -> None:
    joined = Batch.join([Batch.pack([make_rollout("a/0")]), Batch.pack([make_rollout("b/0")])])
    assert [rollout.uid for rollout in unpack_rollouts([joined])] == ["a/0", "b/0"]


def test_a_sample_among_rollouts_is_refused() -> None:
    with pytest.raises(TypeError, match="expected Rollout"):
        unpack_rollouts([Batch.pack([make_sample()])])


def test_rollouts_keep_their_top_k_and_reward_on_the_way() -> None:
    topk = np.arange(8, dtype=np.int32).reshape(4, 2)
    sent = replace(make_rollout("p/0", tokens=4), topk_ids=topk, reward=0.25)
    (came,) = unpack_rollouts([Batch.pack([sent])])
    np.testing.assert_array_equal(came.topk_ids, topk)
    assert came.reward == 0.25


def test_hidden_states_keep_their_bits_on_the_way() -> None:
    states = np.arange(8, dtype=np.uint16).reshape(4, 2)
    sample = Sample(make_rollout(tokens=4), HiddenStates(states, "bfloat16"))
    (came,) = unpack_samples([Batch.pack([sample])])
    np.testing.assert_array_equal(came.scores.states, states)


def test_an_empty_response_is_an_ordinary_rollout() -> None:
    (header,) = Batch.pack([make_rollout("p/0", tokens=0)]).headers
    assert header.staleness(7) == 0
