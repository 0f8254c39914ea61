"""Reserves the GPUs of a run: a Ray placement group for each unit of ``checks.gpu_plan``.

    plan: unit ──► node        Ray: placement group (STRICT_PACK, on that node if it still can)
                                      └─ bundle 0 ◄── host: a replica or a rank, num_gpus
                                                 ◄── its colocated teachers, num_gpus=0

A bundle keeps its GPUs while the processes in it are restarted: no other job can take them, and a
restarted host finds its teachers on the same GPUs. If the node dies, Ray moves the bundle with all
of them to another node with free GPUs; if none has any, ``by_importance.Placement`` decides which
get them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_opd.checks.gpu_plan import RANKS, Unit
from async_opd.checks.resources import hosts_of, pools
from async_opd.cluster import actor_names
from async_opd.cluster.placement.nodes import POLL_S, nodes
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Displaced, StageError
from async_opd.core.stages import TRAINER
from async_opd.waiting.deadline import gather_or_cancel, race

Started = TypeVar("Started")

PLACED, REMOVED = "CREATED", "REMOVED"
"""States of a placement group in Ray; in others it waits for its GPUs."""
OF_RESOURCE = 0.001
"""Share of a custom resource that a process takes: its node has to have it."""


@dataclass(frozen=True)
class GpuBundles:
    """The reserved GPUs of a run, or its places. Can be pickled and sent to other actors.

    Ray gives them back when the run leaves the cluster.
    """

    run: str = ""
    units: tuple[Unit, ...] = ()

    async def strategy(self, name: str, pool: str = RANKS, index: int = 0) -> Any:
        """Where Ray is to start the process ``name``, of this pool or beside it; None: anywhere.

        By default beside the trainer's first rank, where samples end. Displaced while the cluster
        has no room for it.
        """
        for unit in self.units:
            for number, bundle in enumerate(unit.bundles):
                if (bundle.pool, bundle.index) == (pool, index):
                    group, state, _ = await asyncio.to_thread(self._group, unit)
                    if group is None or state != PLACED:
                        raise _gone(name)
                    return PlacementGroupSchedulingStrategy(group, number)
        return None

    def units_with(self, pool: str, *indices: int) -> tuple[Unit, ...]:
        """The units with a bundle of the pool; with one of these ``indices``, if there are any."""
        return tuple(
            unit
            for unit in self.units
            if any(
                one.pool == pool and one.index in (indices or (one.index,)) for one in unit.bundles
            )
        )

    async def while_placed(
        self, name: str, units: Collection[Unit], start: Coroutine[Any, Any, Started]
    ) -> Started:
        """The started process ``name`` in these units, or what needs them all.

        Displaced once one of them has no place: the start does not wait for another one.
        """
        if not units:
            return await start

        async def lost() -> NoReturn:
            while await self._have_places(units):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            raise _gone(name)

        try:
            return await race(start, lost())
        except StageError as error:
            if isinstance(error, Displaced) or await self._have_places(units):
                raise
            raise _gone(name) from error

    async def while_ranks_are_placed(self, start: Coroutine[Any, Any, Started]) -> Started:
        """All that ``start`` starts. Displaced once a rank of the trainer has no place.

        The processes beside it, and those that join its sync group, would wait for its next one.
        """
        return await self.while_placed(TRAINER, self.units_with(RANKS), start)

    async def _have_places(self, units: Collection[Unit]) -> bool:
        """Whether all of these units are on nodes; True while the head does not answer."""
        with suppress(StageError, ray.exceptions.RayError):
            await nodes()
            found = await asyncio.to_thread(self.asked, units)
            return all(found.get(unit) is not None for unit in units)
        return True

    @property
    def needed(self) -> tuple[Unit, ...]:
        """The units without which the run does not start: of a pool that can grow the first."""
        return tuple(unit for unit in self.units if unit.bundles[0].index < unit.least)

    def places(self, config: RunConfig, pool: str) -> PoolPlaces | None:
        """The places of a pool's processes, of guests with their hosts; None in a local run."""
        named = {one.name: one for one in pools(config)}
        host, hosts = named[pool].shares, range(named[pool].most)
        at = hosts if host is None else [of[0] for of in hosts_of(config, pool)]
        units = {(one.pool, one.index): unit for unit in self.units for one in unit.bundles}
        found = {i: units[key] for i, n in enumerate(at) if (key := (host or pool, n)) in units}
        shared = host is not None or any(one.shares == pool for one in named.values())
        return PoolPlaces(self, found, shared) if found else None

    async def placed(self) -> None:
        """Returns once all needed units are placed."""
        await gather_or_cancel(*map(self.one_placed, self.needed))

    async def one_placed(self, unit: Unit) -> PlacementGroup:
        """The unit's group once it is placed. Another one may have taken the place of the first."""
        while True:
            group, state, _ = await asyncio.to_thread(self._group, unit)
            if group is not None and state == PLACED:
                return group
            await asyncio.sleep(POLL_S)

    def create(self, unit: Unit, node: str | None = None) -> PlacementGroup:
        """Asks Ray for the unit's GPUs, those of the ``node`` if it still has them."""
        labels = dict(need.split("=", 1) for need in unit.needs if "=" in need)
        named = {need: OF_RESOURCE for need in unit.needs if "=" not in need}
        return placement_group(
            [({"GPU": one.gpus} if one.gpus else {"memory": 1}) | named for one in unit.bundles],
            strategy="STRICT_PACK",
            name=self._name(unit),
            _soft_target_node_id=node,
            bundle_label_selector=[labels] * len(unit.bundles) if labels else None,
        )

    def remove(self, unit: Unit) -> None:
        """Gives the unit's GPUs back; Ray ends the processes that have them."""
        if (group := self._group(unit)[0]) is not None:
            remove_placement_group(group)

    def asked(self, of: Collection[Unit] | None = None) -> dict[Unit, str | None]:
        """The node of each unit whose GPUs were asked for; None while it waits for them.

        ``of``: some of the units.
        """
        groups = {unit: self._group(unit) for unit in (self.units if of is None else of)}
        return {unit: node or None for unit, (group, _, node) in groups.items() if group}

    def _group(self, unit: Unit) -> tuple[PlacementGroup | None, str, str]:
        """The unit's group, its state and its node; None if there is none, or it is removed."""
        with suppress(ValueError):  # there is none of this name
            group = get_placement_group(self._name(unit))
            state, node = group_state(group)
            if state != REMOVED:
                return group, state, node
        return None, REMOVED, ""

    def _name(self, unit: Unit) -> str:
        return f"{self.run}/{unit.pool}/{unit.bundles[0].index}"


@dataclass(frozen=True)
class PoolPlaces:
    """Implements ``async_opd.processes.members.Places`` over the unit of each process, by index.

    Processes whose GPUs are ``shared`` stay on a node that drains until it is lost.
    """

    bundles: GpuBundles
    units: Mapping[int, Unit]
    shared: bool = False

    async def placed(self, index: int) -> None:
        """See Places. ``by_importance.Placement`` asks for another place."""
        unit = self.units[index]
        while True:
            with suppress(StageError):  # the head does not answer
                known = await nodes()
                node = (await asyncio.to_thread(self.bundles.asked, [unit])).get(unit)
                at = None if node is None else known.get(node)
                if at is not None and at.alive and (self.shared or not at.draining):
                    return
                if at is not None and at.draining:
                    await asyncio.to_thread(self.bundles.remove, unit)
            await asyncio.sleep(POLL_S)

    async def draining(self) -> dict[int, str]:
        """See Places. StageError if the head does not answer."""
        if self.shared:
            return {}
        words = {key: node.loss for key, node in (await nodes()).items() if node.draining}
        if not words:
            return {}
        asked = await asyncio.to_thread(self.bundles.asked, self.units.values())
        return {
            index: words[node]
            for index, unit in self.units.items()
            if (node := asked.get(unit)) in words
        }


def group_state(group: PlacementGroup) -> tuple[str, str]:
    """Ray's state of a placement group, and the node that it is placed on; "" if it is not."""
    table = placement_group_table(group)
    state, at = str(table.get("state", REMOVED)), table.get("bundles_to_node_id", {})
    return state, next(iter(at.values()), "") if state == PLACED else ""


def _gone(name: str) -> Displaced:
    return Displaced(name, "its place in the cluster is lost", "join machines with GPUs")


def names(unit: Unit) -> str:
    """The unit's processes as messages name them."""
    return ", ".join(actor_names.in_pool(bundle.pool, bundle.index).name for bundle in unit.bundles)
