"""From which node each engine and each rank takes its GPUs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.checks.gpu_plan import (
    BEYOND,
    RANKS,
    Bundle,
    GpuNode,
    Unit,
    assign,
    fits,
    growth,
    levels,
    shortage,
    units,
)
from async_opd.checks.resources import Pool
from tests.properties import examples


def engines(*sizes: int, pool: str = "rollout") -> list[Unit]:
    return [Unit((Bundle(pool, index, size),)) for index, size in enumerate(sizes)]


def ranks(count: int) -> list[Unit]:
    return engines(*[1] * count, pool=RANKS)


def room(*free: int) -> dict[str, int]:
    return {f"n{index}": gpus for index, gpus in enumerate(free)}


def possible(sizes: tuple[int, ...], free: tuple[int, ...]) -> bool:
    """Whether there is any assignment, by trying all."""
    if not sizes:
        return True
    first, *others = sizes
    return any(
        possible(tuple(others), (*free[:i], gpus - first, *free[i + 1 :]))
        for i, gpus in enumerate(free)
        if gpus >= first
    )


def possible_with(wanted: list[Unit], free: list[int], marks: list[str]) -> bool:
    """As ``possible``, where a unit's node has the marks that it needs."""
    if not wanted:
        return True
    first, *others = wanted
    return any(
        possible_with(others, [*free[:i], gpus - first.gpus, *free[i + 1 :]], marks)
        for i, gpus in enumerate(free)
        if gpus >= first.gpus and first.needs <= set(marks[i])
    )


a_node = st.integers(0, 8)
any_size = st.integers(1, 8)


@given(st.lists(any_size, max_size=6), st.integers(0, 6), st.lists(a_node, max_size=4))
def test_no_node_gives_more_gpus_than_are_free(
    sizes: list[int], count: int, free: list[int]
) -> None:
    wanted = [*engines(*sizes), *ranks(count)]
    found = assign(wanted, room(*free))
    if found is not None:
        assert set(found) == set(wanted)
        taken = Counter[str]()
        for unit, node in found.items():
            taken[node] += unit.gpus
        assert all(taken[node] <= gpus for node, gpus in room(*free).items())


@examples(200)
@given(st.lists(any_size, max_size=6), st.integers(0, 3), st.lists(a_node, max_size=3).map(tuple))
def test_units_are_assigned_whenever_that_is_possible(
    sizes: list[int], count: int, free: tuple[int, ...]
) -> None:
    found = assign([*engines(*sizes), *ranks(count)], room(*free))
    assert (found is not None) == possible((*sizes, *[1] * count), free)


@given(st.integers(1, 16), st.lists(a_node, min_size=1, max_size=4))
def test_ranks_are_on_as_few_nodes_as_possible(count: int, free: list[int]) -> None:
    found = assign(ranks(count), room(*free))
    if found is not None:
        largest = sorted(free, reverse=True)
        fewest = next(n for n in range(len(free) + 1) if sum(largest[:n]) >= count)
        assert len(set(found.values())) == fewest


def test_ranks_that_fit_on_one_node_are_on_one_beside_engines() -> None:
    found = assign([*engines(4, 4), *ranks(8)], room(8, 8))
    assert found is not None
    assert len({found[rank] for rank in ranks(8)}) == 1


def test_an_engine_is_not_put_where_a_larger_one_has_to_be() -> None:
    found = assign([*engines(1, 1, 8)], room(8, 2))
    assert found == dict(zip(engines(1, 1, 8), ("n1", "n1", "n0"), strict=True))


def test_sizes_that_do_not_divide_each_other_are_assigned_by_trying() -> None:
    assert assign(engines(4, 3, 3, 2, 2, 2), room(8, 8)) is not None


def test_a_large_cluster_that_is_too_small_is_refused_at_once() -> None:
    sizes = [8] * 40 + [4] * 40 + [2] * 40 + [1] * 41
    assert assign(engines(*sizes), room(*[8] * 75)) is None
    assert assign(engines(*sizes[1:]), room(*[8] * 75)) is not None


@pytest.mark.slow
def test_a_thousand_engines_are_assigned() -> None:
    sizes = [4] * 200 + [1] * 800
    found = assign(engines(*sizes), room(*[8] * 200))
    assert found is not None
    assert len(found) == len(sizes)
    assert assign(engines(*sizes), room(*[8] * 199)) is None


def test_ranks_that_no_node_can_hold_are_split_behind_the_engines() -> None:
    found = assign([*engines(4), *ranks(12)], room(8, 8))
    assert found is not None
    assert Counter(found[rank] for rank in ranks(12)) == {"n1": 8, "n0": 4}


def test_neighbouring_ranks_are_on_one_node() -> None:
    found = assign(ranks(12), room(8, 8))
    assert found is not None
    assert [found[rank] for rank in ranks(12)] == ["n0"] * 8 + ["n1"] * 4


def test_bundles_of_one_unit_are_never_on_two_nodes() -> None:
    unit = Unit((Bundle("rollout", 0, 2), Bundle("rollout", 1, 2)))
    assert assign([unit], room(3, 3)) is None
    assert assign([unit], room(3, 4)) == {unit: "n1"}


def test_pools_that_share_gpus_or_take_none_have_no_unit() -> None:
    pools = [
        Pool("rollout", 2, 4, "m"),
        Pool("teachers.t", 2, 4, "m", "rollout"),
        Pool("teachers.server", 3, 0, "m"),
        Pool("train", 1, 1, "m"),
    ]
    assert units(pools) == [*engines(4, 4), *ranks(1)]


@pytest.mark.parametrize(
    ("guests", "sizes"), [((), [1] * 5), ((2,), [2, 2, 1]), ((2, 4), [4, 1]), ((2, 3), [5])]
)
def test_hosts_whose_gpus_one_teacher_shares_are_a_unit(
    guests: tuple[int, ...], sizes: list[int]
) -> None:
    shared = [Pool(f"teachers.{n}", 1, n, "m", "rollout") for n in guests]
    found = units([Pool("rollout", 5, 1, "m"), *shared])
    assert [unit.gpus for unit in found] == sizes
    assert [b.index for unit in found for b in unit.bundles] == list(range(5))


def test_ranks_that_share_rows_are_a_unit() -> None:
    found = units([Pool("train", 6, 1, "m", together=2)])
    assert [[bundle.index for bundle in unit.bundles] for unit in found] == [[0, 1], [2, 3], [4, 5]]


def test_ranks_that_share_rows_and_a_teacher_are_a_unit_together() -> None:
    found = units([Pool("train", 12, 1, "m", together=2), Pool("teachers.t", 1, 3, "m", "train")])
    assert [unit.gpus for unit in found] == [6, 6]


def test_engines_leave_ranks_that_share_rows_whole_nodes() -> None:
    """Behind the engines, the fullest node first, three pairs would find room."""
    pairs = units([Pool("train", 8, 1, "m", together=2)])
    wanted = [*engines(1, 1), *pairs]
    found = assign(wanted, room(5, 5))
    assert found is not None
    assert Counter(found[pair] for pair in pairs) == {"n0": 2, "n1": 2}


def test_gpus_of_others_do_not_make_a_cluster_too_small() -> None:
    assert fits(engines(8), [GpuNode("a", "a", 8, 0)])
    assert not fits(engines(8), [GpuNode("a", "a", 4, 4), GpuNode("b", "b", 4, 4)])


def test_a_shortage_is_a_table_of_needed_available_and_free_gpus() -> None:
    wanted = [*engines(4, 4), *engines(8, pool="teachers.math"), *ranks(2)]
    nodes = [GpuNode("a", "gpu-a (10.0.0.1)", 8, 4), GpuNode("b", "gpu-b (10.0.0.2)", 8, 8)]
    assert shortage(wanted, nodes).splitlines() == [
        "the pools need 18 GPUs, each engine's on one node; the cluster has 16, of which 12 are "
        "free",
        "      pool           engines × GPUs  needed",
        "      rollout                 2 × 4       8",
        "      teachers.math           1 × 8       8",
        "      train                   2 × 1       2",
        "      node              available  free",
        "      gpu-a (10.0.0.1)          8     4",
        "      gpu-b (10.0.0.2)          8     8",
    ]


some_marks = st.sampled_from(["", "a", "b", "ab"])


@examples(200)
@given(
    st.lists(st.tuples(any_size, some_marks), max_size=5),
    st.lists(st.tuples(a_node, some_marks), max_size=4),
)
def test_units_are_on_nodes_with_the_marks_that_they_need_whenever_that_is_possible(
    sizes: list[tuple[int, str]], free: list[tuple[int, str]]
) -> None:
    wanted = [
        replace(unit, needs=frozenset(needs))
        for unit, (_, needs) in zip(engines(*(s for s, _ in sizes)), sizes, strict=True)
    ]
    gpus, marks = [gpus for gpus, _ in free], [marks for _, marks in free]
    by_node = {f"n{i}": frozenset(found) for i, found in enumerate(marks)}
    found = assign(wanted, room(*gpus), by_node)
    assert (found is not None) == possible_with(wanted, gpus, marks)
    assert all(unit.needs <= by_node[node] for unit, node in (found or {}).items())


def test_ranks_are_on_nodes_with_the_marks_that_they_need() -> None:
    wanted = [replace(rank, needs=frozenset("a")) for rank in ranks(3)]
    marks = {"n1": frozenset("a"), "n2": frozenset("ab")}
    found = assign([*wanted, *engines(8)], room(8, 2, 2), marks)
    assert found is not None
    assert {found[rank] for rank in wanted} == {"n1", "n2"}
    assert assign(wanted, room(8, 2, 0), marks) is None


def test_a_shortage_names_what_pools_need_and_nodes_have() -> None:
    nodes = [GpuNode("a", "gpu-a", 1, 1, marks=frozenset({"big", "x=y"})), GpuNode("b", "b", 8, 8)]
    wanted = [replace(unit, needs=frozenset({"big"})) for unit in engines(2)]
    assert not fits(wanted, nodes)
    _, _, pool, _, a, b = shortage(wanted, nodes).splitlines()
    assert pool.split() == ["rollout:", "big", "1", "×", "2", "2"]
    assert a.split() == ["gpu-a:", "big", "1", "1"]
    assert b.split() == ["b", "8", "8"]


def elastic(pool: str, least: int, most: int, gpus: int = 1) -> list[Unit]:
    found = Pool(pool, least, gpus, "m", beyond=most - least)
    return units([found])


a_pool = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
some_pools = st.lists(a_pool, min_size=1, max_size=3)


@given(some_pools, st.lists(a_node, max_size=4), st.data())
@examples(200)
def test_pools_grow_in_turn_as_long_as_there_is_room_for_one_of_them(
    given_pools: list[tuple[int, int, int]], free: list[int], data: st.DataObject
) -> None:
    pools = [
        elastic(f"p{at}", least, least + more, gpus)
        for at, (least, more, gpus) in enumerate(given_pools)
    ]
    wanted = [unit for pool in pools for unit in pool]
    needed = {unit for unit in wanted if unit.bundles[0].index < unit.least}
    beyond = [unit for unit in wanted if unit not in needed]
    asked = needed | set(data.draw(st.lists(st.sampled_from(beyond), unique=True)))
    found = growth(wanted, asked, room(*free), {})
    assert not asked & found.keys()
    left = room(*free)
    for unit, node in found.items():
        left[node] -= unit.gpus
    assert min(left.values(), default=0) >= 0
    absent = [unit for unit in wanted if unit not in asked and unit not in found]
    assert all(unit.gpus > max(left.values(), default=0) for unit in absent)
    counts = Counter(unit.pool for unit in asked)
    for unit in found:  # a pool with fewer beyond its least has no more, or no room
        counts[unit.pool] += 1
        for other in absent:
            if other.gpus <= unit.gpus:
                assert counts[other.pool] - other.least >= counts[unit.pool] - unit.least - 1


@given(some_pools, st.data())
@examples(200)
def test_a_pool_needs_as_many_as_its_least_and_those_first_that_are_placed(
    given_pools: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    wanted = [
        unit
        for at, (least, more, gpus) in enumerate(given_pools)
        for unit in elastic(f"p{at}", least, least + more, gpus)
    ]
    placed = data.draw(st.lists(st.sampled_from(wanted), unique=True))
    level = levels(wanted, placed)
    for pool in {unit.pool for unit in wanted}:
        own = [unit for unit in wanted if unit.pool == pool]
        needed = [unit for unit in own if level[unit] < BEYOND]
        assert len(needed) == own[0].least
        there = [unit for unit in placed if unit.pool == pool]
        assert set(there[: own[0].least]) <= set(needed)


def test_a_pool_that_cannot_grow_needs_all_of_its_engines() -> None:
    fixed = engines(1, 1, 1)
    assert set(levels(fixed, []).values()) == {2, 3}
