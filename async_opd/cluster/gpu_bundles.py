"""Reserves the GPUs of a run: a Ray placement group for each unit of ``checks.gpu_plan``.

    plan: unit ──► node        Ray: placement group (STRICT_PACK, on that node if it still can)
                                      └─ bundle 0 ◄── host: a replica or a rank, num_gpus
                                                 ◄── its colocated teachers, num_gpus=0

A bundle keeps its GPUs while the processes in it are restarted: no other job can take them, and a
restarted host finds its teachers on the same GPUs. If the node dies, Ray moves the bundle to
another node with free GPUs; if none has any, ``watching.placement`` decides who gets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_opd.checks.gpu_plan import Bundle, GpuNode, Unit, assign, fits, shortage, units
from async_opd.checks.resources import pools
from async_opd.cluster import actor_names
from async_opd.cluster.actor_names import run_name
from async_opd.cluster.watching.nodes import PLACED, REMOVED, group_state
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, Problem
from async_opd.waiting.deadline import Deadline
from async_opd.waiting.race import gather_or_cancel

POLL_S = 1.0
"""Seconds between two looks at a cluster whose GPUs others use."""


@dataclass(frozen=True)
class GpuBundles:
    """The reserved GPUs of a run; empty on CPU. Can be pickled and sent to other actors.

    Ray gives them back when the run leaves the cluster.
    """

    run: str = ""
    units: tuple[Unit, ...] = ()

    async def strategy(self, pool: str, index: int) -> Any:
        """Where Ray is to start a process of this pool, or of a guest of its; None on CPU.

        Waits, without a bound of its own, while the cluster has no room for its GPUs.
        """
        for unit in self.units:
            for number, bundle in enumerate(unit.bundles):
                if (bundle.pool, bundle.index) == (pool, index):
                    group = await self._placed(unit)
                    return PlacementGroupSchedulingStrategy(group, number)
        return None

    async def _placed(self, unit: Unit) -> PlacementGroup:
        """The unit's group once it is placed. Another one may have taken the place of the first."""
        while True:
            group = (await asyncio.to_thread(self._groups)).get(self._name(unit))
            if group is not None and await asyncio.to_thread(group_state, group) == PLACED:
                return group
            await asyncio.sleep(POLL_S)

    def create(self, unit: Unit, node: str | None = None) -> PlacementGroup:
        """Asks Ray for the unit's GPUs, those of the ``node`` if it still has them."""
        return placement_group(
            [{"GPU": bundle.gpus} if bundle.gpus else {"memory": 1} for bundle in unit.bundles],
            strategy="STRICT_PACK",
            name=self._name(unit),
            _soft_target_node_id=node,
        )

    def remove(self, unit: Unit) -> None:
        """Gives the unit's GPUs back; Ray ends the processes that have them."""
        if (group := self._groups().get(self._name(unit))) is not None:
            remove_placement_group(group)

    def asked(self) -> dict[Unit, str | None]:
        """The node of each unit whose GPUs were asked for; None while it waits for them."""
        groups, found = self._groups(), dict[Unit, str | None]()
        for unit in self.units:
            if (group := groups.get(self._name(unit))) is not None:
                table = placement_group_table(group)
                placed = table["state"] == PLACED
                found[unit] = next(iter(table["bundles_to_node_id"].values())) if placed else None
        return found

    def _groups(self) -> dict[str, PlacementGroup]:
        """The groups of the run that are not removed, by name."""
        found = {}
        for unit in self.units:
            with suppress(ValueError):  # there is none of this name
                group = get_placement_group(self._name(unit))
                if group_state(group) != REMOVED:
                    found[self._name(unit)] = group
        return found

    def _name(self, unit: Unit) -> str:
        return f"{self.run}/{unit.pool}/{unit.bundles[0].index}"


def names(unit: Unit) -> str:
    """The unit's processes as messages name them."""
    return ", ".join(actor_names.of_pool(bundle.pool, bundle.index) for bundle in unit.bundles)


def trainers_bundle(config: RunConfig) -> GpuBundles:
    """A place without GPUs for the trainer's first rank, and so for the singletons: on one node.

    It takes one byte of memory in Ray's books, which every node has: Ray forgets a node affinity
    that is soft when it restarts an actor. If the node dies, Ray moves it to another one.
    """
    unit = Unit((Bundle("train", 0, 0),))
    bundles = GpuBundles(run_name(config), (unit,))
    bundles.create(unit)
    return bundles


async def reserve(
    config: RunConfig, notify: Callable[[str], None], only: Collection[str] = ()
) -> GpuBundles:
    """Reserves the GPUs of all pools, or ``only`` of some, within ``timeouts.engine_start_s``.

    ConfigError with a table of needed, available and free GPUs if the cluster is too small, also
    after ``cluster.wait_s``, or if others use its GPUs for so long.
    """
    named = [pool for pool in pools(config) if not only or pool.name in only]
    wanted, deadline = units(named), Deadline("cluster")
    bundles = GpuBundles(run_name(config), tuple(wanted))
    groups: dict[Unit, PlacementGroup] = {}
    await _complete(bundles, config.cluster.wait_s, notify)
    try:
        async with asyncio.timeout(config.timeouts.engine_start_s):
            nodes = await _room(wanted, notify, deadline)
            for unit, node in nodes.items():
                groups[unit] = bundles.create(unit, node)
            await gather_or_cancel(*(_ready(group) for group in groups.values()))
    except BaseException as error:
        for group in groups.values():
            remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise _too_small(wanted) from error
        raise
    return bundles


async def _complete(bundles: GpuBundles, wait_s: float, notify: Callable[[str], None]) -> None:
    """Waits until the cluster has nodes for all units. ConfigError if it has not after ``wait_s``.

    Meanwhile Ray is asked for the GPUs of all units, which is what an autoscaler starts nodes for.
    They are given back before the units are assigned: Ray places small ones where large ones fit.
    """
    if not wait_s or fits(bundles.units, gpu_nodes()):
        return
    notify(f"cluster: waiting for machines: {shortage(bundles.units, gpu_nodes())}")
    try:
        async with asyncio.timeout(wait_s):
            for unit in sorted(bundles.units, key=lambda unit: -unit.gpus):
                bundles.create(unit)
            while not fits(bundles.units, gpu_nodes()):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise _too_small(bundles.units) from error
    finally:
        for unit in bundles.units:
            bundles.remove(unit)
    while bundles.asked():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


async def _room(
    wanted: list[Unit], notify: Callable[[str], None], deadline: Deadline
) -> dict[Unit, str]:
    """The planned node of each unit, as soon as enough GPUs are free."""
    looks = 0
    while True:
        nodes = gpu_nodes()
        if not fits(wanted, nodes):
            raise _too_small(wanted)
        found = assign(wanted, {node.id: node.free for node in nodes})
        if found is not None:
            return found
        if looks == 1:  # the first look may be older than the end of another run
            notify(f"cluster: waiting for GPUs that others use: {shortage(wanted, nodes)}")
        looks += 1
        await deadline.pause(POLL_S)


async def _ready(group: PlacementGroup) -> None:
    await group.ready()


def _too_small(wanted: Sequence[Unit]) -> ConfigError:
    nodes = gpu_nodes()
    remedy = "take fewer replicas, smaller tensor_parallel, or join a larger cluster"
    if not any(node.gpus for node in nodes):
        remedy = "join a cluster with GPUs, or set cluster.device: cpu"
    remedy += "; cluster.wait_s waits for machines that join later"
    message = shortage(wanted, nodes)
    return ConfigError([Problem("cluster", "cluster.address", message, remedy)])


def gpu_nodes() -> list[GpuNode]:
    """The cluster's living nodes that have GPUs; if none has any, all of them."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [node for node in alive if "GPU" in node["Resources"]] or alive
    free = ray._private.state.available_resources_per_node()
    return [
        GpuNode(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            int(node["Resources"].get("GPU", 0)),
            int(free.get(node["NodeID"], {}).get("GPU", 0)),
        )
        for node in nodes
    ]
