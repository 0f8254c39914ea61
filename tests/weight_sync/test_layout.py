"""The plan of chunks, the experts of a layer, which travel as one tensor, and held rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.row import Media
from async_opd.weight_sync.layout import (
    HeldRow,
    WeightMeta,
    chunk_plan,
    experts_apart,
    experts_together,
    held_rows,
    tensors_of_an_expert,
)

EXPERTS = "model.layers.0.mlp.experts"
GATE, UP = (f"{EXPERTS}.0.{kind}_proj.weight" for kind in ("gate", "up"))


def test_chunks_cover_every_tensor_once_in_order() -> None:
    plan = chunk_plan([5, 5, 20, 1, 1, 9], 10)
    assert plan == [range(2), range(2, 3), range(3, 5), range(5, 6)]
    assert chunk_plan([], 10) == []


def test_the_bytes_of_tensors_are_counted_once() -> None:
    """Each end asks for them once a tensor: those of a mixture's 18,432 took an engine 49 s."""
    meta = WeightMeta(("a", "b"), ("float32", "bfloat16"), ((2, 3), (5,)), (4, 2))
    assert meta.sizes == (24, 10)
    assert meta.sizes is meta.sizes


@given(
    st.integers(1, 12),
    st.lists(st.sampled_from(("w1", "w3", "gate_proj.weight", "up.bias")), min_size=1, unique=True),
)
def test_experts_that_travel_together_are_apart_what_each_of_them_was(
    experts: int, kinds: list[str]
) -> None:
    apart = {
        f"{EXPERTS}.{number}.{kind}": torch.randn(2, 3)
        for number in range(experts)
        for kind in kinds
    }
    name = experts_together([f"{EXPERTS}.0.{kind}" for kind in kinds])
    of_each = [
        torch.cat([apart[f"{EXPERTS}.{number}.{kind}"] for kind in kinds])
        for number in range(experts)
    ]
    found = dict(experts_apart([(name, torch.stack(of_each))]))
    assert found.keys() == apart.keys()
    assert all(torch.equal(found[one], apart[one]) for one in apart)


def test_experts_are_divided_into_views() -> None:
    together = torch.randn(4, 6, 5)
    apart = experts_apart([(experts_together([GATE, UP]), together)])
    storage = together.untyped_storage().data_ptr()
    assert all(one.untyped_storage().data_ptr() == storage for _, one in apart)


def test_the_name_of_experts_has_the_tensors_of_one() -> None:
    name = experts_together([GATE, UP])
    assert name == f"{EXPERTS}.*.gate_proj.weight+up_proj.weight"
    assert tensors_of_an_expert(name) == ["gate_proj.weight", "up_proj.weight"]


@pytest.mark.parametrize(
    "names", [["model.norm.weight"], [GATE, GATE.replace("experts", "others")]]
)
def test_tensors_that_are_not_of_one_module_of_experts_have_no_name_together(
    names: list[str],
) -> None:
    assert experts_together(names) == ""


def test_other_tensors_stay_as_they_are() -> None:
    given = [("model.norm.weight", torch.ones(2)), ("experts.down_proj", torch.ones(2, 3, 4))]
    assert list(experts_apart(given)) == given


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
