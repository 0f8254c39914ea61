"""Places of processes: those of guests, and those that are lost while a process starts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from async_opd.checks.gpu_plan import Bundle, Unit, units
from async_opd.checks.resources import pools
from async_opd.cluster.placement import gpu_bundles
from async_opd.cluster.placement.gpu_bundles import GpuBundles, PoolPlaces
from async_opd.cluster.placement.nodes import Node
from async_opd.core.errors import Displaced
from tests.world.config import run_config

FIRST, SECOND = (Unit((Bundle("rollout", index, 1),), least=1) for index in range(2))


@dataclass(frozen=True)
class Bundles(GpuBundles):
    """Of two units, the second of which is beyond what is needed; ``there`` have a place."""

    units: tuple[Unit, ...] = (FIRST, SECOND)
    there: set[Unit] = field(default_factory=lambda: {FIRST, SECOND})

    def asked(self, of: Collection[Unit] | None = None) -> dict[Unit, str | None]:
        return {unit: "b" if unit in self.there else None for unit in of or ()}


async def never() -> str:
    await asyncio.Event().wait()
    return "engine"


@pytest.mark.parametrize("state", [None, "RESCHEDULING"])
async def test_a_process_whose_place_is_lost_before_it_is_created_does_not_wait_for_another(
    state: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(name: str) -> str:
        if state is None:
            raise ValueError("there is none of this name")
        return name

    monkeypatch.setattr(gpu_bundles, "get_placement_group", group)
    monkeypatch.setattr(gpu_bundles, "group_state", lambda group: (state, ""))
    with pytest.raises(Displaced, match="student/1: its place in the cluster is lost"):
        await asyncio.wait_for(Bundles().strategy("student/1", "rollout", 1), 5)


@pytest.mark.parametrize("later", [False, True])
async def test_a_start_does_not_wait_for_a_place_that_is_lost(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundles, "POLL_S", 0.001)
    bundles = Bundles()
    asyncio.get_running_loop().call_later(0.01 * later, bundles.there.discard, SECOND)
    with pytest.raises(Displaced):
        await asyncio.wait_for(bundles.while_placed("trainer", (FIRST, SECOND), never()), 5)


def test_units_are_found_by_their_pool_and_their_bundles() -> None:
    bundles = Bundles()
    pool, index = SECOND.bundles[0].pool, SECOND.bundles[0].index
    assert bundles.units_with(pool, index) == (SECOND,)
    assert bundles.units_with(pool) == (FIRST, SECOND)
    assert bundles.units_with("eval") == ()


GUEST = {"model": "t", "placement": "colocated", "with": "rollout"}


def test_guests_have_the_places_of_the_unit_of_their_first_host_and_stay_while_it_drains() -> None:
    given = run_config(
        rollout={"replicas": 4},
        teachers={
            "wide": GUEST | {"tensor_parallel": 2, "replicas": 2},
            "small": GUEST | {"replicas": 3},
            "own": {"model": "t"},
        },
    )
    bundles = GpuBundles("run", tuple(units(pools(given))))

    def places(pool: str) -> PoolPlaces:
        found = bundles.places(given, pool)
        assert found is not None
        return found

    first, second = (unit for unit in bundles.units if unit.pool == "rollout")
    assert places("rollout").units == {0: first, 1: first, 2: second, 3: second}
    assert places("teachers.wide").units == {0: first, 1: second}
    assert places("teachers.small").units == {0: first, 1: first, 2: second}
    shared = {name: places(name).shared for name in ("rollout", "teachers.wide", "teachers.own")}
    assert shared == {"rollout": True, "teachers.wide": True, "teachers.own": False}
    assert GpuBundles().places(given, "teachers.own") is None  # a local run


@pytest.mark.parametrize("shared", [False, True])
async def test_of_a_node_that_drains_processes_with_shared_gpus_do_not_leave(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nodes() -> dict[str, Node]:
        return {"b": Node("machine-b", "", 0, alive=True, draining=True)}

    monkeypatch.setattr(gpu_bundles, "nodes", nodes)
    found = await PoolPlaces(Bundles(), {3: FIRST}, shared).draining()
    assert found == ({} if shared else {3: "machine-b drains"})
