"""Batches: headers without the payload, and everything as it was packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from async_opd.core.batch import Batch, HeaderFields, Stored, cut, unpack
from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import HiddenStates, SampledLogprobs
from tests.conftest import make_rollout, make_sample


def test_a_batch_decodes_to_what_was_packed() -> None:
    (sample,) = unpack(Sample, [Batch.pack([make_sample("p/0", tokens=5)])])
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
    assert [rollout.uid for rollout in unpack(Rollout, [joined])] == ["a/0", "b/0"]


def test_a_sample_among_rollouts_is_refused() -> None:
    with pytest.raises(TypeError, match="expected Rollout"):
        unpack(Rollout, [Batch.pack([make_sample()])])


def test_rollouts_keep_their_top_k_and_reward_on_the_way() -> None:
    topk = np.arange(8, dtype=np.int32).reshape(4, 2)
    sent = replace(make_rollout("p/0", tokens=4), topk_ids=topk, reward=0.25)
    (came,) = unpack(Rollout, [Batch.pack([sent])])
    np.testing.assert_array_equal(came.topk_ids, topk)
    assert came.reward == 0.25


def test_hidden_states_keep_their_bits_on_the_way() -> None:
    states = np.arange(8, dtype=np.uint16).reshape(4, 2)
    sample = Sample(make_rollout(tokens=4), HiddenStates(states, "bfloat16"))
    (came,) = unpack(Sample, [Batch.pack([sample])])
    np.testing.assert_array_equal(came.scores.states, states)


def test_an_empty_response_is_an_ordinary_rollout() -> None:
    (header,) = Batch.pack([make_rollout("p/0", tokens=0)]).headers
    assert header.staleness(7) == 0


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 30))
def test_what_is_cut_is_in_order_and_each_part_within_its_bytes_or_one_item(
    sizes: list[int], most: int
) -> None:
    parts = list(cut(sizes, lambda size: size, most))
    assert [size for part in parts for size in part] == sizes
    assert all(part and (sum(part) <= most or len(part) == 1) for part in parts)
    joined = (left + right[:1] for left, right in pairwise(parts))
    assert all(sum(both) > most for both in joined)


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 1500))
def test_packed_batches_hold_all_items_in_order_within_their_bytes(
    sizes: list[int], most: int
) -> None:
    items = [make_rollout(f"{i}/0", tokens=size) for i, size in enumerate(sizes)]
    batches = list(Batch.packed(items, most))
    assert [one.uid for one in unpack(Rollout, batches)] == [one.uid for one in items]
    assert all(len(b) == 1 or b.nbytes <= most for b in batches)


@given(st.lists(st.lists(st.integers(0, 20), max_size=5), max_size=5), st.integers(1, 1500))
def test_messages_hold_all_items_in_order_within_their_bytes(
    batches: list[list[int]], most: int
) -> None:
    made = [
        Batch.pack(make_rollout(f"{i}-{j}/0", tokens=size) for j, size in enumerate(sizes))
        for i, sizes in enumerate(batches)
    ]
    joined = [Batch.join(parts) for parts in Batch.messages(made, most)]
    uids = [header.uid for one in made for header in one.headers]
    assert [one.uid for one in unpack(Rollout, joined)] == uids
    assert all(len(b) == 1 or b.nbytes <= most for b in joined)


def test_a_batch_that_fits_into_one_message_is_not_copied() -> None:
    batch = Batch.pack([make_rollout("a/0"), make_rollout("b/0")])
    (parts,) = Batch.messages([batch])
    assert Batch.join(parts) is batch


def test_some_items_of_a_batch_are_views_of_it() -> None:
    batch = Batch.pack(make_rollout(f"{i}/0") for i in range(5))
    parts = list(batch.only({"1/0", "2/0", "4/0"}))
    assert [one.uid for one in unpack(Rollout, parts)] == ["1/0", "2/0", "4/0"]
    assert all(np.shares_memory(part.buffer, batch.buffer) for part in parts)


def test_the_first_items_are_found_without_a_look_at_the_rest() -> None:
    class Rows(tuple[HeaderFields, ...]):
        def __iter__(self) -> Iterator[HeaderFields]:
            raise AssertionError("all rows were looked at")

    items = [make_rollout(f"p/{index}", tokens=2) for index in range(8)]
    batch = Batch.pack(items)
    watched = Batch(Rows(batch.rows), batch.buffer)
    assert watched.first(4, batch.nbytes, tokens=12) == 2


class Nowhere:
    """A store that is only named."""

    async def put(self, payloads: Sequence[NDArray[np.uint8]]) -> list[int]:
        return list(range(len(payloads)))

    async def fetch(self, numbers: Sequence[int]) -> list[NDArray[np.uint8] | None]:
        return [None for _ in numbers]

    def settle(self, claimed: Sequence[int], dropped: Sequence[int]) -> None:
        pass


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=9), st.data())
def test_batches_with_stored_payloads_are_split_and_joined_like_others(
    sizes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    rollouts = [make_rollout(f"{i}/0", "ab"[n % 2], tokens=n) for i, (n, _) in enumerate(sizes)]
    samples = [Sample(one, SampledLogprobs(one.rollout_logprobs)) for one in rollouts]
    whole, store = Batch.pack(samples), Nowhere()
    of = Batch.pack(rollouts)
    stored = [
        Stored(store, i, one.nbytes) if by_reference else None
        for i, (one, (_, by_reference)) in enumerate(zip(of.each, sizes, strict=True))
    ]
    batch = Batch.of_stored(of, whole, stored)
    assert batch.rows == whole.rows
    joined = Batch.join(list(batch.each))
    cut_at = data.draw(st.integers(0, len(sizes)))
    again = Batch.join([part for part in joined.split(cut_at) if len(part)])
    for one in (joined, again):
        assert (one.rows, one.nbytes) == (batch.rows, batch.nbytes)
        np.testing.assert_array_equal(one.buffer, batch.buffer)
        assert one.numbers == batch.numbers
    lost = set(data.draw(st.lists(st.sampled_from(range(len(sizes) or 1)), unique=True)))
    kept, gone = batch.without(lost)
    found = {number for part in gone for them in part.numbers.values() for number in them}
    assert found == {i for i in lost if i < len(sizes) and sizes[i][1]}
    assert sum(map(len, kept)) + len(found) == len(sizes)
    back = [(teacher, part) for one in gone for teacher, part in one.rollouts()]
    assert all(row[4] == teacher for teacher, part in back for row in part.rows)
    expected = list(of.only({f"{i}/0" for i in found}))
    assert Batch.join([part for _, part in back]).rows == Batch.join(expected).rows
    assert len(unpack(Rollout, [part for _, part in back])) == len(found)
    if found:
        with pytest.raises(ValueError, match="stored payloads: read them first"):
            unpack(Sample, gone)
