"""Micro-batches for several ranks: all samples once, equally many for each, about equal in size."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from trainer.batches.micro_batches import assign_micro_batches
from trainer.batches.packing import group_by_budget

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
def test_every_sample_is_computed_once(lengths: list[int], budget: int, ranks: int) -> None:
    found = chain.from_iterable(chain.from_iterable(assign_micro_batches(lengths, budget, ranks)))
    assert sorted(found) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
def test_all_ranks_have_equally_many(lengths: list[int], budget: int, ranks: int) -> None:
    found = assign_micro_batches(lengths, budget, ranks)
    assert len(found) == ranks
    assert len({len(groups) for groups in found}) == 1


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
def test_the_budget_holds_unless_one_sample_is_longer(
    lengths: list[int], budget: int, ranks: int
) -> None:
    for group in chain(*assign_micro_batches(lengths, budget, ranks)):
        assert len(group) < 2 or sum(lengths[index] for index in group) <= budget


@given(LENGTHS, st.integers(1, 60))
def test_one_rank_has_what_is_planned_for_one(lengths: list[int], budget: int) -> None:
    assert assign_micro_batches(lengths, budget, 1) == [group_by_budget(lengths, budget)]


@given(st.lists(st.integers(1, 50), min_size=4, max_size=40), st.integers(1, 60), st.integers(2, 4))
def test_no_rank_is_without_a_sample_while_there_are_enough_for_all(
    lengths: list[int], budget: int, ranks: int
) -> None:
    first = [groups[0] for groups in assign_micro_batches(lengths, budget, ranks)]
    assert all(first)


def test_a_round_has_micro_batches_of_about_equal_size() -> None:
    lengths = [9, 1, 5, 4, 4, 1, 8, 2]
    for one, two in zip(*assign_micro_batches(lengths, 10, 2), strict=True):
        assert abs(sum(lengths[i] for i in one) - sum(lengths[i] for i in two)) <= 2
