"""Watches the cluster of a run from its driver, while stages are built, supervised or rewound.

every WATCH_S: nodes() ──► a node is lost, or has joined: one line
                     ├──► a process waits for GPUs: see ``Placement``
                     └──► no answer: one line at once; after HEAD_S HeadLost ends the run

The nodes are those that Ray's head knows; it has the verdict on one that is silent:

a member fails ──► its node answers: the member's own failure
              └──► its node is silent ──► the head's verdict, some 15 s later: the node is lost

The GPUs that are left after the loss of a machine go to the most important processes:

    a unit waits for GPUs ──► the units that wait, and the table of what is missing: one message
                          └─► a less important unit gives its GPUs up, and waits for others

The trainer comes first, then a replica of each teacher, a replica of the student, and all others.
Pools that can grow get GPUs beyond these last, in turn (``Growth``), and lose them first:

    free GPUs, and no unit waits ──► a unit of the pool with the fewest beyond what it needs
    such a unit waits for GPUs   ──► it gives up: its pool shrinks
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

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
from async_opd.core.errors import HeadLost, StageError, StageTimeout
from async_opd.waiting.deadline import Bound, Deadline, Timer
from async_opd.waiting.waits import Waits

WATCH_S = 2.0
"""Seconds between two questions, which take the head a millisecond."""
HEAD_S = 20.0
"""Seconds without an answer after which the run ends."""
RECONNECT, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
"""Ray's variable of the seconds after which it ends a process whose head is lost, and its default.
"""
NOTICED_S = 40.0
"""Longest time from the head's loss to HeadLost, and what the end of a run takes besides."""
REMEDY = (
    "start the cluster again, and --resume the run; docs/cluster.md says how a head can outlive "
    "its process"
)
ANSWER_S = 5.0
"""Seconds in which the head has to answer, and a node to accept a connection."""
VERDICT_S = 90.0
"""Longest wait for the verdict. Ray's head asks a node every 3 s, and gives it up after five
questions in a row that failed, each after at most 10 s."""
POLL_S = 1.0
PLACED, REMOVED = "CREATED", "REMOVED"
"""States of a placement group in Ray; in others it waits for its GPUs."""


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


@dataclass(frozen=True)
class Node:
    """``name`` is for messages; ``why`` says why it is not ``alive``."""

    name: str
    address: str
    port: int
    alive: bool
    why: str = ""
    draining: bool = False

    @property
    def loss(self) -> str:
        """The words for it once it is not alive, or drains."""
        words = "drains" if self.alive and self.draining else "is lost"
        return f"{self.name} {words}" + (f": {self.why}" if self.why else "")


async def nodes() -> dict[str, Node]:
    """All nodes by Ray's id, lost ones too; none in a process that is connected to no cluster.

    StageError if the head does not answer in time.
    """
    if not ray.is_initialized():
        return {}
    client = ray._private.worker.global_worker.gcs_client
    try:
        async with Bound(2 * ANSWER_S):  # for a call that does not keep its own timeout
            found, *_ = await client.async_get_all_node_info(timeout=ANSWER_S)
            draining = await asyncio.to_thread(draining_nodes)
    except (ray.exceptions.RayError, TimeoutError) as error:
        cause = f"Ray's head does not answer: {' '.join(str(error).split()) or 'no answer in time'}"
        raise StageError("cluster", cause) from error
    return {
        key.hex(): Node(
            f"{one.node_manager_hostname} ({one.node_manager_address})",
            one.node_manager_address,
            one.node_manager_port,
            one.state == 0,  # GcsNodeInfo.ALIVE
            " ".join(one.death_info.reason_message.split()),
            key.hex() in draining,
        )
        for key, one in found.items()
    }


def draining_nodes() -> frozenset[str]:
    """Ray's ids of the nodes that are to end soon, and get no process any more."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def group_state(group: PlacementGroup) -> tuple[str, str]:
    """Ray's state of a placement group, and the node that it is placed on; "" if it is not."""
    table = placement_group_table(group)
    state, at = str(table.get("state", REMOVED)), table.get("bundles_to_node_id", {})
    return state, next(iter(at.values()), "") if state == PLACED else ""


async def lost_node(
    node: str,
    ask: Callable[[], Awaitable[Mapping[str, Node]]] = nodes,
    answers: Callable[[Node], Awaitable[bool]] | None = None,
    timer: Timer | None = None,
) -> Node | None:
    """The node with this id, if any, if it is lost; waits for the verdict if it is silent.

    It waits for a silent head, too, which could not start another process. None if there is no
    verdict within ``VERDICT_S``.
    """
    deadline = Deadline("cluster", timer)

    async def verdict() -> Node | None:
        while True:
            with suppress(StageError):
                found = (await ask()).get(node)
                if found is not None and not found.alive:
                    return found
                if found is None or await (answers or _answers)(found):
                    return None
            await deadline.pause(POLL_S)

    with suppress(StageTimeout):
        return await deadline.within(VERDICT_S, "the verdict on a node", verdict())
    return None


async def _answers(node: Node) -> bool:
    """Whether Ray's server of the node accepts a connection."""
    try:
        async with Bound(ANSWER_S):
            _, writer = await asyncio.open_connection(node.address, node.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def left_s() -> float:
    """Seconds for the last checkpoint after HeadLost, before Ray ends this process; perhaps 0."""
    return max(float(os.environ.get(RECONNECT, RECONNECT_S)) - NOTICED_S, 0)


class ClusterWatch:
    """``notify`` gets the lines."""

    def __init__(
        self,
        notify: Callable[[str], None],
        placement: Placement | None = None,
        ask: Callable[[], Awaitable[Mapping[str, Node]]] = nodes,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notify = notify
        self._placement = placement
        self._ask = ask
        self._deadline = Deadline("cluster", timer)
        self._clock = clock
        self._alive: Mapping[str, Node] | None = None
        self._draining: frozenset[str] = frozenset()
        self._changed = False
        self._silent_since: float | None = None

    async def run(self) -> NoReturn:
        """Until cancelled. Raises HeadLost when the head has not answered for ``HEAD_S``."""
        try:
            while True:
                await self.look()
                await self._deadline.pause(WATCH_S)
        finally:
            if self._placement is not None:
                self._placement.close()

    async def look(self) -> None:
        """Asks the head once, and the units that wait for GPUs; see ``run``."""
        asked = self._clock()
        try:
            self._changed |= self._noticed(await self._ask())
            if self._placement is not None:  # it asks the head too, where Ray has no bound
                look = self._placement.look(self._changed)
                await self._deadline.within(2 * ANSWER_S, "the head's answer about GPUs", look)
            self._changed = False
        except (StageError, ray.exceptions.RayError) as error:
            self._head_is_silent(asked, error)
            return
        if self._silent_since is not None:
            self._notify("cluster: Ray's head answers again")
            self._silent_since = None

    def _noticed(self, found: Mapping[str, Node]) -> bool:
        """Whether nodes were lost, have joined or drain since the last look; says which.

        Those that drain make room later, when their processes have left.
        """
        alive = {key: node for key, node in found.items() if node.alive}
        before, self._alive = self._alive or alive, alive
        for key in before.keys() - alive.keys():
            self._notify(f"cluster: {found.get(key, before[key]).loss}")
        for key in alive.keys() - before.keys():
            self._notify(f"cluster: {alive[key].name} has joined")
        draining = frozenset(key for key, node in alive.items() if node.draining)
        for key in draining - self._draining:
            leave = "its replicas leave it; those that share GPUs stay until it is lost"
            self._notify(f"cluster: {alive[key].name} drains: {leave}")
        self._draining = draining
        return bool(draining) or before.keys() != alive.keys()

    def _head_is_silent(self, asked: float, error: Exception) -> None:
        words = error.cause if isinstance(error, StageError) else " ".join(str(error).split())
        if self._silent_since is None:
            self._silent_since = asked
            self._notify(f"cluster: {words}; unless it answers, the run ends after {HEAD_S:g} s")
        silent_s = self._clock() - self._silent_since
        if silent_s >= HEAD_S:
            cause = f"Ray's head has not answered for {silent_s:.0f} s: {words}"
            raise HeadLost("cluster", cause, REMEDY) from error
