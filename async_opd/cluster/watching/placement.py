"""Gives the GPUs that are left after the loss of a machine to the most important processes.

    a unit waits for GPUs ──► the units that wait, and the table of what is missing: one message
                          └─► a less important unit gives its GPUs up, and waits for others

The trainer comes first, then a replica of each teacher, a replica of the student, and all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Protocol

from async_opd.checks.gpu_plan import GpuNode, Unit, given_up, levels, shortage
from async_opd.waiting.waits import Waits


class Reserved(Protocol):
    """The reserved GPUs of a run; see ``gpu_bundles.GpuBundles``."""

    @property
    def units(self) -> tuple[Unit, ...]: ...
    def asked(self) -> dict[Unit, str | None]: ...
    def create(self, unit: Unit) -> object: ...
    def remove(self, unit: Unit) -> None: ...


class Placement:
    """Keeps the ``bundles`` placed. ``hosts`` are the pools whose GPUs teachers share."""

    def __init__(
        self,
        bundles: Reserved,
        hosts: Collection[str],
        notify: Callable[[str], None],
        waits: Waits,
        nodes: Callable[[], list[GpuNode]],
        names: Callable[[Unit], str],
    ) -> None:
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
        if not any(unit.gpus for unit in self._bundles.units):
            return
        if not (changed or again or self._waiting):
            return
        asked, nodes = await asyncio.to_thread(lambda: (self._bundles.asked(), self._nodes()))
        placed = {unit: node for unit, node in asked.items() if node is not None}
        before, self._waiting = self._waiting, frozenset(self._bundles.units) - placed.keys()
        lacking = self._waiting & before
        level = levels(self._bundles.units, placed, self._hosts)
        waiting = sorted(lacking, key=lambda unit: (level[unit], self._bundles.units.index(unit)))
        self._say(waiting, nodes)
        free = {node.id: node.free for node in nodes}
        given = given_up(waiting, placed, free, level)
        for unit, other in given.items():
            self._notify(
                f"cluster: {self._names(unit)} gives its GPUs to {self._names(other)}, "
                "without which the run cannot go on"
            )
            await asyncio.to_thread(self._bundles.remove, unit)
        if not given:
            await self._ask_again(waiting, asked, free)

    async def _ask_again(
        self, waiting: Sequence[Unit], asked: Collection[Unit], free: dict[str, int]
    ) -> None:
        """Asks for the GPUs of those that gave theirs up, once more important ones have theirs.

        Ray may place the groups that wait in any order.
        """
        for unit in waiting:
            if unit not in asked:
                await asyncio.to_thread(self._bundles.create, unit)
            if any(gpus >= unit.gpus for gpus in free.values()):
                return

    def _say(self, waiting: Sequence[Unit], nodes: Sequence[GpuNode]) -> None:
        if frozenset(waiting) == self._shown:
            return
        self._shown = frozenset(waiting)
        self._open.close()
        if waiting:
            names = ", ".join(map(self._names, waiting))
            table = shortage(self._bundles.units, nodes)
            self._notify(f"cluster: GPUs are missing for {names}: {table}")
            self._open.enter_context(self._waits.on(f"GPUs for {names}"))

    def close(self) -> None:
        """Ends the lines about what is waited for."""
        self._open.close()
        self._shown = self._waiting = frozenset()
