"""Micro-batches for several ranks: all samples once, equally many for each, about equal in size."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.batches.micro_batches import assign_micro_batches, by_tokens, step_cost
from trainer.batches.packing import group_by_budget
from trainer.utilization import ModelSize

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


SIZE = ModelSize(decoder=3_000, head=500, attention=(60, 60), windows=(None, 8))


def cost_of(lengths: list[int], size: ModelSize = SIZE) -> list[float]:
    return [size.training_flops([n], [n // 2]) for n in lengths]


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
def test_every_sample_is_computed_once(lengths: list[int], budget: int, ranks: int) -> None:
    assigned = assign_micro_batches(lengths, budget, ranks, cost_of(lengths))
    found = chain.from_iterable(chain.from_iterable(assigned))
    assert sorted(found) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
def test_all_ranks_have_equally_many(lengths: list[int], budget: int, ranks: int) -> None:
    found = assign_micro_batches(lengths, budget, ranks, cost_of(lengths))
    assert len(found) == ranks
    assert len({len(groups) for groups in found}) == 1


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
def test_the_budget_holds_unless_one_sample_is_longer(
    lengths: list[int], budget: int, ranks: int
) -> None:
    for group in chain(*assign_micro_batches(lengths, budget, ranks, cost_of(lengths))):
        assert len(group) < 2 or sum(lengths[index] for index in group) <= budget


@given(LENGTHS, st.integers(1, 60))
def test_one_rank_has_what_is_planned_for_one(lengths: list[int], budget: int) -> None:
    assert assign_micro_batches(lengths, budget, 1, cost_of(lengths)) == [
        group_by_budget(lengths, budget)
    ]


@given(st.lists(st.integers(1, 50), min_size=4, max_size=40), st.integers(1, 60), st.integers(2, 4))
def test_no_rank_is_without_a_sample_while_there_are_enough_for_all(
    lengths: list[int], budget: int, ranks: int
) -> None:
    assigned = assign_micro_batches(lengths, budget, ranks, cost_of(lengths))
    first = [groups[0] for groups in assigned]
    assert all(first)


def test_a_round_has_micro_batches_of_about_equal_size() -> None:
    lengths = [9, 1, 5, 4, 4, 1, 8, 2]
    for one, two in zip(*assign_micro_batches(lengths, 10, 2), strict=True):
        assert abs(sum(lengths[i] for i in one) - sum(lengths[i] for i in two)) <= 2


@given(LENGTHS.filter(bool), st.integers(1, 60), st.integers(2, 4))
def test_no_step_takes_longer_than_balancedby_tokens(
    lengths: list[int], budget: int, ranks: int
) -> None:
    costs = cost_of(lengths)
    found = assign_micro_batches(lengths, budget, ranks, costs)
    before = by_tokens(lengths, budget, ranks, costs)
    assert step_cost(found, lengths, costs) <= step_cost(before, lengths, costs)


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
