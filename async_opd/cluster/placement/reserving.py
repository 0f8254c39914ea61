"""Reserves the GPUs of a run, all of them or none, once the cluster has room for them.

    room for all units? ──► ask for all of them ──► all are placed in ``TOGETHER_S``: reserved
      └─ no: wait for machines, or for GPUs that others use      └─ no: give them back, and again

On CPUs, places take the GPUs' part.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from random import SystemRandom

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
from async_opd.checks.resources import pools
from async_opd.cluster.actor_names import run_name
from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.cluster.placement.nodes import ANSWER_S, POLL_S, cluster_nodes, gpu_nodes, with_gpus
from async_opd.cluster.remote import START_KEY
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, Problem
from async_opd.models.engine_args import Device
from async_opd.waiting.deadline import Deadline

TOGETHER_S = 20.0
"""Seconds for Ray to place all units after a look that found room for them."""


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
    on = with_gpus(nodes)
    if (found := _room_for(wanted, on)) is not None:
        return found, ""
    if not fits(wanted, on) and not config.cluster.wait_s:
        raise _too_small(wanted, on)
    return {}, shortage(wanted, on)


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
        with suppress(TimeoutError):  # another run took them: ``Growth`` gives this place up
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
