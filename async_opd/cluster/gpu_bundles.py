"""Reserves the GPUs of a run: a Ray placement group for each unit of ``checks.gpu_plan``.

    plan: unit ──► node        Ray: placement group (STRICT_PACK, on that node if it still can)
                                      └─ bundle 0 ◄── host: a replica or a rank, num_gpus
                                                 ◄── its colocated teachers, num_gpus=0

A bundle keeps its GPUs while the processes in it are restarted: no other job can take them, and a
restarted host finds its teachers on the same GPUs. If the node dies, Ray moves the bundle with all
of them to another node with free GPUs; if none has any, ``watching.Placement`` decides which get
them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import SystemRandom
from typing import Any, NoReturn, TypeVar

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_opd.checks.gpu_plan import (
    Bundle,
    GpuNode,
    Unit,
    assign,
    fits,
    growth,
    marks_of,
    shortage,
    units,
    without_node,
)
from async_opd.checks.resources import hosts_of, pools
from async_opd.cluster import actor_names
from async_opd.cluster.actor_names import run_name
from async_opd.cluster.remote import START_KEY
from async_opd.cluster.watching import (
    ANSWER_S,
    PLACED,
    POLL_S,
    REMOVED,
    draining_nodes,
    group_state,
    nodes,
)
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, Displaced, Problem, StageError
from async_opd.models.engine_args import Device
from async_opd.waiting.deadline import Deadline, gather_or_cancel, race

Started = TypeVar("Started")

OF_RESOURCE = 0.001
"""Share of a custom resource that a process takes: its node has to have it."""
TOGETHER_S = 20.0
"""Seconds for Ray to place all units after a look that found room for them."""


@dataclass(frozen=True)
class GpuBundles:
    """The reserved GPUs of a run, or its places. Can be pickled and sent to other actors.

    Ray gives them back when the run leaves the cluster.
    """

    run: str = ""
    units: tuple[Unit, ...] = ()

    async def strategy(self, name: str, pool: str, index: int) -> Any:
        """Where Ray is to start the process ``name``, of this pool or beside it; None: anywhere.

        Displaced while the cluster has no room for it.
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
        """See Places. ``watching.Placement`` asks for another place."""
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


def _gone(name: str) -> Displaced:
    return Displaced(name, "its place in the cluster is lost", "join machines with GPUs")


def names(unit: Unit) -> str:
    """The unit's processes as messages name them."""
    return ", ".join(actor_names.in_pool(bundle.pool, bundle.index).name for bundle in unit.bundles)


async def cpu_places(config: RunConfig) -> GpuBundles:
    """Places without GPUs, on the nodes in turn: the singletons are at that of the first rank.

    Ray would start processes that reserve nothing anywhere. A place takes one byte of memory in
    Ray's books, which every node has: Ray forgets a node affinity that is soft when it restarts an
    actor. If a node dies, Ray moves its places to other ones.
    """
    found = _in_turn(config, await asyncio.to_thread(cluster_nodes))
    places = GpuBundles(run_name(config), tuple(found))
    for unit, node in found.items():
        await asyncio.to_thread(places.create, unit, node)
    bound, what = config.timeouts.engine_start_s, "placing its processes"
    await Deadline("cluster").within(bound, what, places.placed(), f"raise {START_KEY}")
    return places


def _in_turn(config: RunConfig, nodes: Sequence[GpuNode]) -> dict[Unit, str]:
    """The node of each process on CPUs. ConfigError if none has what a pool needs."""
    wanted = [
        Unit((Bundle(pool.name, index, 0),), pool.needs)
        for pool in pools(config)
        if pool.shares is None
        for index in range(pool.most)
    ]
    if without_node(wanted, nodes):
        raise _too_small(wanted, nodes)
    found, taken = dict[Unit, str](), Counter[str]()
    for unit in wanted:
        fitting = [node.id for node in nodes if unit.needs <= node.marks]
        found[unit] = min(fitting, key=taken.__getitem__)
        taken[found[unit]] += 1
    return found


def planned(
    config: RunConfig, device: Device, nodes: Sequence[GpuNode]
) -> tuple[dict[Unit, str], str]:
    """The node that each unit would get now, and the table of GPUs that the run would wait for.

    ConfigError with the table if the cluster is too small, and no machines are waited for.
    """
    if device == "cpu":
        return _in_turn(config, nodes), ""
    wanted = GpuBundles(units=tuple(units(pools(config)))).needed
    with_gpus = _with_gpus(nodes)
    if (found := _room_for(wanted, with_gpus)) is not None:
        return found, ""
    if not fits(wanted, with_gpus) and not config.cluster.wait_s:
        raise _too_small(wanted, with_gpus)
    return {}, shortage(wanted, with_gpus)


async def reserve(
    config: RunConfig, notify: Callable[[str], None], only: Collection[str] = ()
) -> GpuBundles:
    """Reserves the GPUs of all pools, or ``only`` of some, within ``timeouts.engine_start_s``.

    ConfigError with a table of needed, available and free GPUs if the cluster is too small, also
    after ``cluster.wait_s``, or if others use its GPUs for so long.
    """
    named = [pool for pool in pools(config) if not only or pool.name in only]
    bundles = GpuBundles(run_name(config), tuple(units(named)))
    if only:
        bundles = replace(bundles, units=bundles.needed)
    await _ask_for_machines(bundles, config.cluster.wait_s, notify)
    try:
        async with asyncio.timeout(config.timeouts.engine_start_s):
            while not await _are_reserved(bundles, notify):
                notify("cluster: another run took some of the GPUs; all are asked for again later")
                await asyncio.sleep(SystemRandom().uniform(0, TOGETHER_S))
    except TimeoutError as error:
        found = await asyncio.to_thread(gpu_nodes)
        raise _too_small(bundles.needed, found) from error
    await _grown(bundles)
    return bundles


async def _grown(bundles: GpuBundles) -> None:
    """Asks for the GPUs that pools can have beyond what they need, as far as they are free."""
    found = await asyncio.to_thread(gpu_nodes)
    free = {node.id: node.free for node in found}
    for unit, node in growth(bundles.units, bundles.needed, free, marks_of(found)).items():
        await asyncio.to_thread(bundles.create, unit, node)
        with suppress(TimeoutError):  # another run took them: ``watching`` gives this place up
            async with asyncio.timeout(ANSWER_S):
                await bundles.one_placed(unit)


async def _are_reserved(bundles: GpuBundles, notify: Callable[[str], None]) -> bool:
    """Whether all units got their GPUs; otherwise none has any.

    Of two runs that start at the same moment each could have a part of what both need, for ever.
    """
    placed = False
    try:
        for unit, node in (await _room(bundles.needed, notify)).items():
            await asyncio.to_thread(bundles.create, unit, node)
        with suppress(TimeoutError):
            async with asyncio.timeout(TOGETHER_S):
                await bundles.placed()
                placed = True
    finally:
        if not placed:
            await _give_back(bundles)
    return placed


async def _give_back(bundles: GpuBundles) -> None:
    """Removes all groups. A head that is lost does not answer, and is not waited for."""

    def remove() -> None:
        for unit in bundles.units:
            bundles.remove(unit)

    with suppress(TimeoutError):
        async with asyncio.timeout(2 * ANSWER_S):
            await asyncio.to_thread(remove)
            while await asyncio.to_thread(bundles.asked):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


async def _ask_for_machines(
    bundles: GpuBundles, wait_s: float, notify: Callable[[str], None]
) -> None:
    """Asks Ray for the GPUs of all units until there is room for them, for ``wait_s`` at most.

    That is what an autoscaler starts nodes for. They are given back before the units are assigned:
    Ray places small ones where large ones fit.
    """
    if not wait_s:
        return
    found = await asyncio.to_thread(gpu_nodes)
    if _room_for(bundles.needed, found) is not None:
        return
    notify(f"cluster: waiting for machines: {shortage(bundles.needed, found)}")
    try:
        with suppress(TimeoutError):  # what follows says what is missing
            async with asyncio.timeout(wait_s):
                for unit in sorted(bundles.needed, key=lambda unit: -unit.gpus):
                    await asyncio.to_thread(bundles.create, unit)
                while not await asyncio.to_thread(_has_room, bundles):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
    finally:
        await _give_back(bundles)


def _has_room(bundles: GpuBundles) -> bool:
    """Whether there is room for all units, were the placed ones given back."""
    own = bundles.asked()
    found = [
        replace(node, free=node.free + sum(u.gpus for u, at in own.items() if at == node.id))
        for node in gpu_nodes()
    ]
    return _room_for(bundles.needed, found) is not None


def _room_for(wanted: Sequence[Unit], nodes: Collection[GpuNode]) -> dict[Unit, str] | None:
    return assign(wanted, {node.id: node.free for node in nodes}, marks_of(nodes))


async def _room(wanted: Sequence[Unit], notify: Callable[[str], None]) -> dict[Unit, str]:
    """The planned node of each unit, as soon as enough GPUs are free."""
    looks = 0
    while True:
        nodes = await asyncio.to_thread(gpu_nodes)
        if not fits(wanted, nodes):
            raise _too_small(wanted, nodes)
        if (found := _room_for(wanted, nodes)) is not None:
            return found
        if looks == 1:  # the first look may be older than the end of another run
            notify(f"cluster: waiting for GPUs that others use: {shortage(wanted, nodes)}")
        looks += 1
        await asyncio.sleep(POLL_S)


def _too_small(wanted: Sequence[Unit], nodes: Sequence[GpuNode]) -> ConfigError:
    remedy = "take fewer replicas, smaller tensor_parallel, or join a larger cluster"
    if not any(node.gpus for node in nodes):
        remedy = "join a cluster with GPUs, or set cluster.device: cpu"
    remedy += "; cluster.wait_s waits for machines that join later"
    if lacking := without_node(wanted, nodes):
        remedy = (
            "start Ray there with --labels or --resources, or change cluster.labels and resources"
        )
        return ConfigError([Problem("cluster", "cluster.labels", lacking, remedy)])
    message = shortage(wanted, nodes)
    return ConfigError([Problem("cluster", "cluster.address", message, remedy)])


def gpu_nodes() -> list[GpuNode]:
    """The cluster's living nodes that have GPUs; if none has any, all of them."""
    return _with_gpus(cluster_nodes())


def _with_gpus(nodes: Sequence[GpuNode]) -> list[GpuNode]:
    return [node for node in nodes if node.gpus] or [*nodes]


def cluster_nodes() -> list[GpuNode]:
    """The cluster's living nodes, without those that drain."""
    draining = draining_nodes()
    free = ray._private.state.available_resources_per_node()
    return [
        GpuNode(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            int(node["Resources"].get("GPU", 0)),
            int(free.get(node["NodeID"], {}).get("GPU", 0)),
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("memory", 0)),
            frozenset(node["Resources"]).union(
                f"{name}={value}" for name, value in node.get("Labels", {}).items()
            ),
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    ]
