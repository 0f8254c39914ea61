"""From which node each engine and each rank takes its GPUs. Nodes and pools are numbers here.

    unit: GPUs that have to be on one node ──assign──► node
      └─ bundle: the GPUs of one process, its colocated teachers included

``async_opd.cluster.placement`` reserves what is planned here.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from async_opd.checks.resources import Pool
from async_opd.memory.pools import EVAL

RANKS = "train"
"""The pool whose units are kept on few nodes: ranks talk to each other in every layer."""

OTHERS, BEYOND = 3, 4
"""Levels of units without which the run goes on: see ``levels``."""

MAX_TRIED = 1000
"""Dead ends after which a search gives up. Only sizes that do not divide each other have them."""


Marks = Mapping[str, frozenset[str]]
NO_MARKS: Marks = {}


@dataclass(frozen=True)
class Bundle:
    """The GPUs of one process: replica or rank ``index`` of ``pool``, and its guests."""

    pool: str
    index: int
    gpus: int


@dataclass(frozen=True)
class Unit:
    """Bundles on one node: an engine never spans two."""

    bundles: tuple[Bundle, ...]
    needs: frozenset[str] = frozenset()
    """Its node has all of these ``GpuNode.marks``."""
    least: int = sys.maxsize
    """Units of its pool without which the run does not start; of a pool that cannot grow all."""

    @property
    def pool(self) -> str:
        """The pool of its bundles."""
        return self.bundles[0].pool

    @property
    def gpus(self) -> int:
        """GPUs of all of its bundles."""
        return sum(bundle.gpus for bundle in self.bundles)


@dataclass(frozen=True)
class GpuNode:
    """A node of the cluster: its id, a name for messages, its GPUs and how many are free.

    ``cpus`` and ``memory`` (bytes) are those that Ray counts there. ``marks`` are its labels
    (``NAME=VALUE``), and the names of its resources.
    """

    id: str
    name: str
    gpus: int
    free: int
    cpus: int = 0
    memory: int = 0
    marks: frozenset[str] = frozenset()


def units(pools: Collection[Pool]) -> list[Unit]:
    """A unit for each replica and each rank that has dedicated GPUs.

    Those whose GPUs one colocated teacher shares are a unit together, and so are ranks that share
    rows: they exchange keys and values in every layer.
    """
    found = []
    for pool in pools:
        if pool.gpus:
            size = pool.gpus_per_replica
            guests = [-(-p.gpus_per_replica // size) for p in pools if p.shares == pool.name]
            bundles = [Bundle(pool.name, index, size) for index in range(pool.most)]
            together = math.lcm(pool.together, *guests)
            least = pool.replicas if pool.beyond else sys.maxsize
            found += [
                Unit(tuple(bundles[at : at + together]), pool.needs, least)
                for at in range(0, len(bundles), together)
            ]
    return found


def assign(
    units: Collection[Unit], free: dict[str, int], marks: Marks = NO_MARKS
) -> dict[Unit, str] | None:
    """The node of each unit, or None if one finds no node. ``free``: free GPUs by node.

    A unit is on a node that has the ``marks`` which it needs. Other units take nodes with such
    marks last.

    Larger units come first, each to the fullest node with room for it. All ranks together come as
    one unit; if no node has room for it, they come last, each to the node of the rank before or,
    when that is full, to the emptiest one. If that finds no nodes for ranks that share rows, which
    have to be on one, they come by their size.

    If each size divides the next larger one (1, 2, 4, 8), an assignment is found whenever there is
    one, by the first choices: a unit can always change places with smaller ones of exactly its
    size. For other sizes, and needs, further choices are tried, up to ``MAX_TRIED`` that fail.
    """
    known = frozenset[str]().union(*(unit.needs for unit in units))
    marks = {node: marks.get(node, frozenset()) & known for node in free}
    ranks = [unit for unit in units if unit.pool == RANKS]
    others = [[unit] for unit in units if unit.pool != RANKS]
    together = _largest_first([*others, ranks] if ranks else others, dict(free), marks)
    return (
        together
        or _ranks_last(others, ranks, dict(free), marks)
        or _largest_first([*others, *([rank] for rank in ranks)], dict(free), marks)
    )


def _largest_first(
    blocks: list[list[Unit]], free: dict[str, int], marks: Marks
) -> dict[Unit, str] | None:
    """Assigns whole blocks, and takes their GPUs out of ``free``."""
    found = _search(sorted(blocks, key=_size, reverse=True), free, marks)
    for unit, node in (found or {}).items():
        free[node] -= unit.gpus
    return found


def _search(blocks: list[list[Unit]], free: dict[str, int], marks: Marks) -> dict[Unit, str] | None:
    """Assigns the blocks in order, each to the fullest node that leaves room for the others."""
    free, levels = dict(free), [_Level.of(blocks, free, marks)]
    chosen: list[str] = []
    tried: set[tuple[object, ...]] = set()
    while levels and len(chosen) < len(blocks) and len(tried) <= MAX_TRIED:
        level = levels[-1]
        if len(chosen) == len(levels):  # the level above has found no node: another one here
            free[chosen.pop()] += level.needed
        node = None if level.state in tried else next(level.nodes, None)
        if node is None:
            tried.add(level.state)
            levels.pop()
            continue
        free[node] -= level.needed
        chosen.append(node)
        levels.append(_Level.of(blocks[len(chosen) :], free, marks))
    if len(chosen) < len(blocks):
        return None
    return {u: node for block, node in zip(blocks, chosen, strict=True) for u in block}


@dataclass(frozen=True)
class _Level:
    """One block of a search: its GPUs, and the nodes that are still to be tried for it.

    ``state`` is the number of blocks from it on, and the free GPUs with the marks beside them: what
    decides whether there is an assignment.
    """

    state: tuple[object, ...]
    needed: int
    nodes: Iterator[str]

    @classmethod
    def of(cls, blocks: Sequence[list[Unit]], free: dict[str, int], marks: Marks) -> _Level:
        """The level of the first block; without blocks one that needs nothing."""
        block = blocks[0] if blocks else []
        needed = _gpus(block)
        kinds = {
            node: (len(marks[node]), gpus, *sorted(marks[node])) for node, gpus in free.items()
        }
        rooms = {
            kinds[node]: node
            for node, gpus in reversed(free.items())
            if gpus >= needed and _may(block, node, marks)
        }
        nodes = iter([node for _, node in sorted(rooms.items())])
        return cls((len(blocks), *sorted(kinds.values())), needed, nodes)


def _ranks_last(
    others: list[list[Unit]], ranks: list[Unit], free: dict[str, int], marks: Marks
) -> dict[Unit, str] | None:
    found = _largest_first(others, free, marks)
    if found is None:
        return None
    node = ""
    for rank in ranks:
        rooms = [node for node in free if _may([rank], node, marks)]
        if node not in rooms or free[node] < rank.gpus:
            node = max(rooms, key=free.__getitem__, default="")
        if free.get(node, 0) < rank.gpus:
            return None
        free[node] -= rank.gpus
        found[rank] = node
    return found


def _gpus(block: Sequence[Unit]) -> int:
    return sum(unit.gpus for unit in block)


def _size(block: Sequence[Unit]) -> tuple[int, int]:
    """Those that need marks come before others of as many GPUs."""
    return _gpus(block), max((len(unit.needs) for unit in block), default=0)


def _may(block: Sequence[Unit], node: str, marks: Marks) -> bool:
    return all(unit.needs <= marks.get(node, frozenset()) for unit in block)


def fits(units: Collection[Unit], nodes: Collection[GpuNode]) -> bool:
    """Whether the cluster has room for the units once no other job uses its GPUs."""
    return assign(units, {node.id: node.gpus for node in nodes}, marks_of(nodes)) is not None


def marks_of(nodes: Collection[GpuNode]) -> Marks:
    """The marks of each node, by its id."""
    return {node.id: node.marks for node in nodes}


def without_node(units: Collection[Unit], nodes: Collection[GpuNode]) -> str:
    """The pools for which no node has what they need, in words; '' if there is none."""
    lacking = {u.pool: u.needs for u in units if not any(u.needs <= node.marks for node in nodes)}
    return "; ".join(
        f"no node has {' and '.join(sorted(needs))}, which {pool} needs"
        for pool, needs in lacking.items()
    )


def shortage(units: Collection[Unit], nodes: Collection[GpuNode]) -> str:
    """Two tables: the GPUs that each pool needs, and the available and free ones of each node."""
    pools: dict[str, list[Unit]] = {}
    for unit in units:
        pools.setdefault(unit.pool, []).append(unit)
    known = frozenset[str]().union(*(unit.needs for unit in units))
    needed = [
        (
            _marked(name, found[0].needs),
            " + ".join(_terms([u.gpus for u in found])),
            str(_gpus(found)),
        )
        for name, found in pools.items()
    ]
    found = [(_marked(n.name, n.marks & known), str(n.gpus), str(n.free)) for n in nodes]
    total, available = _gpus(list(units)), sum(node.gpus for node in nodes)
    free = sum(node.free for node in nodes)
    head = f"the pools need {total} GPUs, each engine's on one node; the cluster has {available}"
    return "\n".join(
        (
            f"{head}, of which {free} are free",
            *table([("pool", "engines × GPUs", "needed"), *needed]),
            *table([("node", "available", "free"), *found]),
        )
    )


def _marked(name: str, marks: frozenset[str]) -> str:
    return f"{name}: {', '.join(sorted(marks))}" if marks else name


def _terms(sizes: Sequence[int]) -> list[str]:
    """``2 × 4`` for two engines of four GPUs each; the largest first."""
    return [f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True)]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines of one width each column, indented; the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "      "
        + row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def levels(
    units: Collection[Unit], placed: Collection[Unit], hosts: Collection[str] = ()
) -> dict[Unit, int]:
    """How important each unit is for the run to go on; 0 is the most important.

    The trainer, a replica of each teacher, a replica of the student, then all ``OTHERS``, and
    ``BEYOND`` those that a pool has beyond what it needs. Of a pool those that are ``placed`` come
    first, in their order. ``hosts`` are the pools whose GPUs teachers share.
    """
    found: dict[Unit, int] = {}
    before = Counter[str]()
    order = {unit: number for number, unit in enumerate(placed)}
    for unit in sorted(units, key=lambda unit: order.get(unit, sys.maxsize)):
        if unit.pool == RANKS:
            found[unit] = 0
        elif before[unit.pool] >= unit.least:
            found[unit] = BEYOND
        elif before[unit.pool] or unit.pool == EVAL:
            found[unit] = OTHERS
        else:
            found[unit] = 1 if unit.pool in hosts or unit.pool.startswith("teachers.") else 2
        before[unit.pool] += 1
    return found


def growth(
    units: Collection[Unit], asked: Collection[Unit], free: Mapping[str, int], marks: Marks
) -> dict[Unit, str]:
    """The units that pools grow by now, in their order, each with a node that has room for it.

    ``asked`` are those that have or wait for GPUs. The next one is of the pool that has the fewest
    beyond those that it needs; of two such pools, of the one that comes first.
    """
    room, counts = dict(free), Counter(unit.pool for unit in asked)
    left = {
        unit.pool: [u for u in units if u.pool == unit.pool and u not in asked] for unit in units
    }
    found: dict[Unit, str] = {}
    while pools := [name for name, absent in left.items() if absent]:
        name = min(pools, key=lambda name: counts[name] - left[name][0].least)
        unit = left[name].pop(0)
        placed = assign([unit], room, marks)
        if placed is None:
            left[name] = []  # the others of the pool are as large
            continue
        found |= placed
        room[placed[unit]] -= unit.gpus
        counts[name] += 1
    return found


def given_up(
    waiting: Sequence[Unit],
    placed: Mapping[Unit, str],
    free: Mapping[str, int],
    level: Mapping[Unit, int],
    marks: Marks = NO_MARKS,
) -> dict[Unit, Unit]:
    """The placed units that give their GPUs up, each with the more important one that gets them.

    No node has room for that one. ``waiting`` units come in the order of their importance;
    ``free``: free GPUs by node; ``marks`` as for ``assign``.
    """
    room, given = dict(free), dict[Unit, Unit]()
    for unit in waiting:
        allowed = [node for node in room if _may([unit], node, marks)]
        fitting = [node for node in allowed if room[node] >= unit.gpus]
        if fitting:
            room[min(fitting, key=room.__getitem__)] -= unit.gpus
            continue
        choices = []
        for node in allowed:
            there = (u for u, at in placed.items() if at == node and u not in given)
            taken, gpus = list[Unit](), room[node]
            for one in sorted(there, key=lambda u: -level[u]):
                if gpus < unit.gpus and level[one] > level[unit]:
                    taken.append(one)
                    gpus += one.gpus
            for one in [*taken]:  # a large one may make small ones needless
                if gpus - one.gpus >= unit.gpus:
                    taken.remove(one)
                    gpus -= one.gpus
            if gpus >= unit.gpus:
                choices.append((-min(level[one] for one in taken), _gpus(taken), node, taken))
        if choices:
            *_, node, taken = min(choices, key=lambda choice: choice[:3])
            given |= dict.fromkeys(taken, unit)
            room[node] += _gpus(taken) - unit.gpus
    return given
