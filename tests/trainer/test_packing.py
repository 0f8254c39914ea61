"""Packing: budgets, order, and that packed samples do not attend to each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.models import random_sample, tiny_model
from trainer.batches.packing import group_by_budget, pack


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_a_plan_holds_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = group_by_budget(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[i] for i in group) <= budget or len(group) == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", [[(5, 3), (1, 7), (8, 2)], [(0, 1), (0, 1), (2, 1), (0, 4)]])
def test_packed_samples_do_not_attend_to_each_other(
    attention: str, sizes: list[tuple[int, int]]
) -> None:
    model = tiny_model().eval()
    model.set_attn_implementation(attention)
    samples = [random_sample(i, r, prompt=p) for i, (r, p) in enumerate(sizes)]
    packed = pack(samples)
    with torch.no_grad():
        together = model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
        ).logits[0]
        alone = torch.cat([model(input_ids=pack([s]).input_ids).logits[0] for s in samples])
    assert (together - alone).abs().max() < 1e-5


def test_rows_are_those_that_predict_the_response_tokens() -> None:
    packed = pack([random_sample(0, 2, prompt=3), random_sample(1, 3, prompt=4)])
    assert packed.rows.tolist() == [2, 3, 8, 9, 10]


def test_targets_are_the_response_tokens() -> None:
    packed = pack([random_sample(0, 2), random_sample(1, 3)])
    assert packed.input_ids[0, packed.rows + 1].tolist() == packed.tokens.targets.tolist()


def test_positions_start_anew_with_every_sample() -> None:
    packed = pack([random_sample(0, 2, prompt=1), random_sample(1, 1, prompt=1)])
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_an_empty_response_adds_no_row() -> None:
    assert len(pack([random_sample(0, 0), random_sample(1, 2)]).rows) == 2


def test_mixed_scores_are_refused() -> None:
    with pytest.raises(TypeError, match="several kinds"):
        pack([random_sample(0, 2, k=4), random_sample(1, 2)])


@given(st.lists(st.integers(1, 10), max_size=20), st.integers(0, 20))
def test_a_sample_over_the_budget_is_alone(lengths: list[int], at: int) -> None:
    long = min(at, len(lengths))
    groups = group_by_budget([*lengths[:long], 11, *lengths[long:]], 10)
    assert [long] in groups


def test_packed_top_k_scores_are_those_of_the_samples_in_order() -> None:
    samples = [random_sample(0, 2, k=4), random_sample(1, 0, k=4), random_sample(2, 3, k=4)]
    packed = pack(samples)
    expected = np.concatenate([vars(sample.scores)["ids"] for sample in samples])
    assert packed.tokens.teacher_ids is not None
    assert packed.tokens.teacher_ids.tolist() == expected.tolist()


def test_packed_rollout_logprobs_line_up_with_the_targets() -> None:
    samples = [random_sample(0, 2), random_sample(1, 3)]
    expected = np.concatenate([sample.rollout.rollout_logprobs for sample in samples])
    assert pack(samples).tokens.rollout_logprobs.tolist() == expected.tolist()
