"""Reserves the GPUs of a run: a Ray placement group for each unit of ``checks.gpu_plan``.

    plan: unit ──► node        Ray: placement group (STRICT_PACK, on that node if it still can)
                                      └─ bundle 0 ◄── host: a replica or a rank, num_gpus
                                                 ◄── its colocated teachers, num_gpus=0

A bundle keeps its GPUs while the processes in it are restarted: no other job can take them, and a
restarted host finds its teachers on the same GPUs. If the node dies, Ray moves the bundle to
another node with free GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_opd.checks.gpu_plan import GpuNode, Unit, assign, fits, shortage, units
from async_opd.checks.resources import pools
from async_opd.cluster.actor_names import run_name
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

    groups: Mapping[tuple[str, int], tuple[PlacementGroup, int]] = field(default_factory=dict)
    """Placement group and number of the bundle, by pool and index of the process."""

    def strategy(self, pool: str, index: int) -> Any:
        """Where Ray is to start a process of this pool, or of a guest of its; None on CPU."""
        if (pool, index) not in self.groups:
            return None
        group, number = self.groups[pool, index]
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)


async def reserve(
    config: RunConfig, notify: Callable[[str], None], only: Collection[str] = ()
) -> GpuBundles:
    """Reserves the GPUs of all pools, or ``only`` of some, within ``timeouts.engine_start_s``.

    ConfigError with a table of needed, available and free GPUs if the cluster is too small, or if
    others use its GPUs for so long.
    """
    named = [pool for pool in pools(config) if not only or pool.name in only]
    wanted, deadline = units(named), Deadline("cluster")
    groups: dict[Unit, PlacementGroup] = {}
    try:
        async with asyncio.timeout(config.timeouts.engine_start_s):
            nodes = await _room(wanted, notify, deadline)
            for unit, node in nodes.items():
                groups[unit] = placement_group(
                    [{"GPU": bundle.gpus} for bundle in unit.bundles],
                    strategy="STRICT_PACK",
                    name=f"{run_name(config)}/{unit.pool}/{unit.bundles[0].index}",
                    _soft_target_node_id=node,
                )
            await gather_or_cancel(*(_ready(group) for group in groups.values()))
    except BaseException as error:
        for group in groups.values():
            remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise _too_small(wanted) from error
        raise
    return GpuBundles(
        {
            (bundle.pool, bundle.index): (group, number)
            for unit, group in groups.items()
            for number, bundle in enumerate(unit.bundles)
        }
    )


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


def _too_small(wanted: list[Unit]) -> ConfigError:
    remedy = "take fewer replicas, smaller tensor_parallel, or join a larger cluster"
    message = shortage(wanted, gpu_nodes())
    return ConfigError([Problem("cluster", "cluster.address", message, remedy)])


def gpu_nodes() -> list[GpuNode]:
    """The cluster's living nodes that have GPUs."""
    free = ray._private.state.available_resources_per_node()
    return [
        GpuNode(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            int(node["Resources"]["GPU"]),
            int(free.get(node["NodeID"], {}).get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"] and "GPU" in node["Resources"]
    ]
