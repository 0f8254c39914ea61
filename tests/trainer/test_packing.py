"""Packing, and micro-batches for several ranks: all samples once, in about equal parts."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.models import random_sample, tiny_model
from trainer.batches.micro_batches import assign_micro_batches, by_tokens, step_cost
from trainer.batches.packing import group_by_budget, pack
from trainer.utilization import ModelSize

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


SIZE = ModelSize(decoder=3_000, head=500, attention=(60, 60), windows=(None, 8))


def cost_of(lengths: list[int], size: ModelSize = SIZE) -> list[float]:
    return [size.training_flops([n], [n // 2]) for n in lengths]


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
def test_every_sample_is_computed_once_and_all_ranks_have_equally_many_within_the_budget(
    lengths: list[int], budget: int, ranks: int
) -> None:
    assigned = assign_micro_batches(lengths, budget, ranks, cost_of(lengths))
    groups = list(chain.from_iterable(assigned))
    assert sorted(chain.from_iterable(groups)) == list(range(len(lengths)))
    assert len(assigned) == ranks
    assert len({len(of_rank) for of_rank in assigned}) == 1
    assert all(len(one) < 2 or sum(lengths[i] for i in one) <= budget for one in groups)
    if ranks == 1:
        assert assigned == [group_by_budget(lengths, budget)]


@given(st.lists(st.integers(1, 50), min_size=4, max_size=40), st.integers(1, 60), st.integers(2, 4))
def test_each_rank_has_one_of_enough_samples(lengths: list[int], budget: int, ranks: int) -> None:
    assigned = assign_micro_batches(lengths, budget, ranks, cost_of(lengths))
    first = [groups[0] for groups in assigned]
    assert all(first)


def test_a_round_has_micro_batches_of_about_equal_size() -> None:
    lengths = [9, 1, 5, 4, 4, 1, 8, 2]
    for one, two in zip(*assign_micro_batches(lengths, 10, 2), strict=True):
        assert abs(sum(lengths[i] for i in one) - sum(lengths[i] for i in two)) <= 2


@given(LENGTHS.filter(bool), st.integers(1, 60), st.integers(2, 4))
def test_no_step_takes_longer_than_by_tokens(lengths: list[int], budget: int, ranks: int) -> None:
    costs = cost_of(lengths)
    found = assign_micro_batches(lengths, budget, ranks, costs)
    before = by_tokens(lengths, budget, ranks, costs)
    assert step_cost(found, lengths, costs) <= step_cost(before, lengths, costs)


def test_a_step_costs_the_most_expensive_group_of_each_round_and_512_tokens() -> None:
    """Costs are two for each token: 1024 a round."""
    assigned = [[[0], [1]], [[2], [3]]]
    assert step_cost(assigned, [10, 20, 30, 5], [20, 40, 60, 10]) == 1024 + 60 + 1024 + 40


def test_ranks_idle_less_with_log_normal_lengths() -> None:
    """Of a 4B student on 8 ranks, in 10 steps of 256 samples of 2000 tokens in the median."""
    size = ModelSize(3_600_000_000, 388_000_000, (32 * 2 * 128,) * 36, (None,) * 36)
    draw = np.random.default_rng(0)
    idle, before = 0.0, 0.0
    for _ in range(10):
        lengths = np.minimum(draw.lognormal(np.log(2000), 1, 256), 32_000).astype(int).tolist()
        costs = cost_of(lengths, size)
        busy = sum(costs) / 8
        for_ranks = (lengths, 32_768, 8, costs)
        idle += step_cost(assign_micro_batches(*for_ranks), lengths, costs) - busy
        before += step_cost(by_tokens(*for_ranks), lengths, costs) - busy
    assert idle < 0.6 * before


# ── packing: order, and that packed samples do not attend to each other ────────────────────────


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_a_plan_holds_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = group_by_budget(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[i] for i in group) <= budget or len(group) == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", [[(5, 3), (1, 7), (8, 2)], [(0, 1), (0, 1), (2, 1), (0, 4)]])
def test_packed_samples_are_apart(attention: str, sizes: list[tuple[int, int]]) -> None:
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
    """An empty response has none; positions start anew with every sample."""
    samples = [random_sample(0, 2), random_sample(1, 0, prompt=1), random_sample(2, 3, prompt=4)]
    packed = pack(samples)
    assert packed.rows.tolist() == [2, 3, 9, 10, 11]
    assert packed.position_ids.tolist() == [[*range(5), 0, *range(7)]]
    assert packed.input_ids[0, packed.rows + 1].tolist() == packed.tokens.targets.tolist()
    expected = np.concatenate([sample.rollout.rollout_logprobs for sample in samples])
    assert packed.tokens.rollout_logprobs.tolist() == expected.tolist()


def test_packed_top_k_scores_are_those_of_the_samples_in_order() -> None:
    samples = [random_sample(0, 2, k=4), random_sample(1, 0, k=4), random_sample(2, 3, k=4)]
    packed = pack(samples)
    expected = np.concatenate([vars(sample.scores)["ids"] for sample in samples])
    assert packed.tokens.teacher_ids.tolist() == expected.tolist()
