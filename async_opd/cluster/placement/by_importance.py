"""The GPUs that are left after the loss of a machine go to the most important processes.

    a unit waits for GPUs ──► the units that wait, and the table of what is missing: one message
                          └─► a less important unit gives its GPUs up, and waits for others

The trainer comes first, then a replica of each teacher, a replica of the student, and all others.
Pools that can grow get GPUs beyond these last, in turn (``Growth``), and lose them first:

    free GPUs, and no unit waits ──► a unit of the pool with the fewest beyond what it needs
    such a unit waits for GPUs   ──► it gives up: its pool shrinks
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from async_opd.checks.gpu_plan import (
    BEYOND,
    OTHERS,
    GpuNode,
    Unit,
    given_up,
    growth,
    levels,
    marks_of,
    shortage,
)
from async_opd.core.errors import StageError
from async_opd.waiting.waits import Waits


class Reserved(Protocol):
    """The reserved GPUs of a run; see ``gpu_bundles.GpuBundles``."""

    @property
    def units(self) -> tuple[Unit, ...]: ...
    def asked(self) -> dict[Unit, str | None]: ...
    def create(self, unit: Unit, node: str | None = None) -> object: ...
    def remove(self, unit: Unit) -> None: ...


async def any_node(node: str) -> None:
    """Compares nothing."""


class Placement:
    """Keeps the ``bundles`` placed. ``hosts`` are the pools whose GPUs teachers share.

    ``compare`` raises StageError for a node that differs from the driver's: no pool grows there.
    """

    def __init__(
        self,
        bundles: Reserved,
        hosts: Collection[str],
        notify: Callable[[str], None],
        waits: Waits,
        nodes: Callable[[], list[GpuNode]],
        names: Callable[[Unit], str],
        compare: Callable[[str], Awaitable[None]] = any_node,
    ) -> None:
        self._elastic = Growth(bundles, notify, names, compare)
        self._bundles = bundles
        self._hosts = hosts
        self._notify = notify
        self._waits = waits
        self._nodes = nodes
        self._names = names
        self._again = False
        self._waiting: frozenset[Unit] = frozenset()
        self._shown: frozenset[Unit] = frozenset()
        self._open = ExitStack()

    async def look(self, changed: bool) -> None:
        """Asks Ray which units wait for GPUs, if nodes have ``changed`` or some did before.

        After a change it asks twice: Ray may notice later which units a lost node leaves without
        GPUs. Ray may just be moving a unit that waits at one look; for one that waits at two in a
        row the cluster has no GPUs.
        """
        again, self._again = self._again, changed
        due = changed or again or self._waiting
        if not self._bundles.units or not (due or await self._elastic.is_due(self._nodes)):
            return
        asked, nodes = await asyncio.to_thread(lambda: (self._bundles.asked(), self._nodes()))
        placed = {unit: node for unit, node in asked.items() if node is not None}
        level = levels(
            self._bundles.units, [*placed, *(u for u in asked if u not in placed)], self._hosts
        )
        needed = frozenset(unit for unit in self._bundles.units if level[unit] < BEYOND)
        before, self._waiting = self._waiting, needed - placed.keys()
        lacking = self._waiting & before
        order = {unit: (level[unit], at) for at, unit in enumerate(self._bundles.units)}
        waiting = sorted(lacking, key=order.__getitem__)
        self._say(waiting, nodes, needed)
        free = {node.id: node.free for node in nodes}
        given = given_up(waiting, placed, free, level, marks_of(nodes))
        for unit, other in given.items():
            why = (
                "without which the run cannot go on"
                if level[other] < OTHERS
                else "which comes first"
            )
            self._notify(
                f"cluster: {self._names(unit)} gives its GPUs to {self._names(other)}, {why}"
            )
            await asyncio.to_thread(self._bundles.remove, unit)
        if not given:
            await self._ask_again(sorted(self._waiting, key=order.__getitem__), asked, nodes)
        await self._elastic.look(asked, level, nodes, grows=not self._waiting)

    async def _ask_again(
        self, waiting: Sequence[Unit], asked: Collection[Unit], nodes: Sequence[GpuNode]
    ) -> None:
        """Asks for the GPUs of those that gave theirs up, once more important ones have theirs.

        Ray may place the groups that wait in any order.
        """
        for unit in waiting:
            if unit not in asked:
                await asyncio.to_thread(self._bundles.create, unit)
            if any(node.free >= unit.gpus and unit.needs <= node.marks for node in nodes):
                return

    def _say(
        self, waiting: Sequence[Unit], nodes: Sequence[GpuNode], needed: Collection[Unit]
    ) -> None:
        if frozenset(waiting) == self._shown:
            return
        self._shown = frozenset(waiting)
        self._open.close()
        if waiting:
            names = ", ".join(map(self._names, waiting))
            lack, table = "GPUs", shortage([u for u in self._bundles.units if u in needed], nodes)
            if not any(unit.gpus for unit in waiting):
                needs = ", ".join(sorted(frozenset().union(*(unit.needs for unit in waiting))))
                lack, table = "machines", f"the cluster has none with {needs or 'free memory'}"
            self._notify(f"cluster: {lack} are missing for {names}: {table}")
            self._open.enter_context(self._waits.on(f"{lack} for {names}"))

    def close(self) -> None:
        """Ends the lines about what is waited for, and comparisons of nodes."""
        self._open.close()
        self._elastic.close()
        self._shown = self._waiting = frozenset()


class Growth:
    """Lets pools that can grow have the GPUs that nothing else needs; says how many they have."""

    def __init__(
        self,
        bundles: Reserved,
        notify: Callable[[str], None],
        names: Callable[[Unit], str],
        compare: Callable[[str], Awaitable[None]],
    ) -> None:
        self._bundles, self._notify, self._names, self._compare = bundles, notify, names, compare
        self._units = [unit for unit in bundles.units if unit.least < len(bundles.units)]
        self._placed: Mapping[Unit, str] | None = None
        self._late: frozenset[Unit] = frozenset()
        self._new = False
        self._compared: dict[str, asyncio.Task[bool]] = {}
        self._named: dict[str, str] = {}

    async def is_due(self, ask: Callable[[], Sequence[GpuNode]]) -> bool:
        """Whether a pool may grow now, or gives up; at the first look any may."""
        if not self._units:
            return False
        nodes = await asyncio.to_thread(ask)
        self._named |= {node.id: node.name for node in nodes}
        absent = [unit for unit in self._units if unit not in (self._placed or {})]
        fitting = (
            self._may_grow_on(node.id)
            for node in nodes
            if any(node.free >= unit.gpus and unit.needs <= node.marks for unit in absent)
        )
        return any([*fitting, self._placed is None, self._late, self._new])

    async def look(
        self,
        asked: Mapping[Unit, str | None],
        level: Mapping[Unit, int],
        nodes: Sequence[GpuNode],
        grows: bool,
    ) -> None:
        """Gives up what waits beyond what is needed, and asks for what there is room for."""
        if not self._units:
            return
        self._named |= {node.id: node.name for node in nodes}
        self._say({unit: node for unit in self._units if (node := asked.get(unit))})
        late = frozenset(u for u in self._units if asked.get(u, "") is None and level[u] == BEYOND)
        for unit in late & self._late:
            await asyncio.to_thread(self._bundles.remove, unit)
        self._late = late
        free = {node.id: node.free for node in nodes if node.free and self._may_grow_on(node.id)}
        found = growth(self._units, asked, free, marks_of(nodes)) if grows else {}
        self._new = bool(found)
        for unit, node in found.items():
            await asyncio.to_thread(self._bundles.create, unit, node)

    def _may_grow_on(self, node: str) -> bool:
        """Whether the node was compared with the driver's, and is alike; it is asked once."""
        if node not in self._compared:
            self._compared[node] = asyncio.create_task(self._comparison(node))
        task = self._compared[node]
        return task.done() and task.result()

    async def _comparison(self, node: str) -> bool:
        try:
            await self._compare(node)
        except (StageError, OSError) as error:  # one of a disk or a shared folder, too
            self._notify(f"cluster: no pool grows on {self._named[node]}: {error}")
            return False
        return True

    def _say(self, placed: Mapping[Unit, str]) -> None:
        before, self._placed = self._placed, placed
        for pool in dict.fromkeys(unit.pool for unit in self._units):
            units = [unit for unit in self._units if unit.pool == pool]
            had = [unit for unit in units if unit in (before or {})]
            has = [unit for unit in units if unit in placed]
            if had == has:
                continue
            parts = [
                f"{self._names(u)} on {self._named.get(placed[u], 'a lost node')}"
                for u in has
                if u not in had
            ]
            parts += [
                f"{self._names(u)} has left {self._named.get(before[u], 'a lost node')}"
                for u in had
                if before and u not in has
            ]
            verb = "has" if before is None else "grows to" if len(has) > len(had) else "shrinks to"
            of = f"{len(has)} of {units[0].least}–{len(units)} replicas"
            self._notify(f"cluster: {pool} {verb} {of}: {', '.join(parts)}")

    def close(self) -> None:
        """Ends comparisons of nodes."""
        for task in self._compared.values():
            task.cancel()
        self._compared.clear()
