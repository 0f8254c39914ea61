"""Admission: the budget admitted ≤ (v + 1 + s)·K·B and who it wakes."""

from __future__ import annotations

import asyncio
from math import floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.accounting.admission import Admission
from tests.world.clock import settle


def admission(s: float = 0.0, k: int = 1, b: int = 4, steps: int = 100) -> Admission:
    return Admission(batch_size=b, sync_steps=k, staleness_threshold=s, steps=steps)


async def admitted(budget: Admission, samples: int, at_most: int = 1) -> int:
    return budget.try_admit(samples, await budget.room(samples, at_most))


async def blocked(budget: Admission, samples: int = 1) -> bool:
    task = asyncio.create_task(budget.room(samples))
    await settle(3)
    done = task.done()
    task.cancel()
    return not done


@pytest.mark.parametrize(
    ("settings", "group", "groups"),
    [({}, 1, 4), ({"s": 0.5, "k": 2}, 1, 12), ({"s": 0.5}, 4, 1), ({"s": 9, "steps": 2}, 1, 8)],
    ids=["on-policy", "with a threshold", "whole groups", "no more than is trained"],
)
async def test_a_version_admits_so_many_groups_and_no_more(
    settings: dict[str, Any], group: int, groups: int
) -> None:
    budget = admission(**settings)
    assert (await budget.room(group, 99), budget.admitted) == (groups, 0)  # a wait admits nothing
    assert await admitted(budget, group, 99) == groups
    assert await blocked(budget, group)


async def test_a_lost_sample_gives_its_place_to_another() -> None:
    budget = admission()
    await admitted(budget, 4)
    budget.give_back(1)
    assert await admitted(budget, 1) == 1


@pytest.mark.parametrize("before", [4, 12], ids=["full", "over it, after a resume"])
async def test_admission_goes_on_when_the_budget_has_caught_up(before: int) -> None:
    budget = admission(s=0.0)
    budget.restore(0, before)
    assert (budget.try_admit(1, at_most_groups=64), budget.admitted) == (0, before)
    waiting = asyncio.create_task(admitted(budget, 1, 64))
    for version in range(1, before // 4):
        budget.advance(version)
        await asyncio.sleep(0)
        assert (waiting.done(), budget.admitted) == (False, before)
    budget.advance(before // 4)
    assert await asyncio.wait_for(waiting, 5) == 4
    assert budget.admitted == budget.budget == before + 4


@given(
    st.lists(st.tuples(st.sampled_from(["admit", "back", "advance"]), st.integers(1, 9))),
    st.integers(0, 60),
)
def test_whatever_was_admitted_before_no_admission_exceeds_the_budget(
    calls: list[tuple[str, int]], before: int
) -> None:
    budget = admission(s=0.5, k=2)
    budget.restore(1, before)
    for call, number in calls:
        was = budget.admitted
        if call == "admit":
            groups = budget.try_admit(2, number)
            assert 0 <= groups <= number
            assert budget.admitted == was + 2 * groups
            assert not groups or budget.admitted <= budget.budget
        elif call == "back":
            budget.give_back(min(number, was))
        else:
            budget.advance(budget.version + number)


def test_versions_never_go_back() -> None:
    budget = admission()
    budget.advance(2)
    with pytest.raises(ValueError, match="from 2 to 1"):
        budget.advance(1)


@given(
    st.integers(0, 50),
    st.integers(0, 30).map(lambda tenths: tenths / 10),
    st.integers(1, 8),
    st.integers(1, 64),
)
def test_the_budget_is_the_formula_without_rounding(v: int, s: float, k: int, b: int) -> None:
    budget = admission(s=s, k=k, b=b, steps=10**9)
    budget.advance(v)
    tenths = round(s * 10)
    assert budget.budget == floor((10 * (v + 1) + tenths) * k * b // 10)
