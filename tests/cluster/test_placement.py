"""Machines with GPUs are lost: who waits is said, and the most important processes come first."""

from __future__ import annotations

import pytest

from async_opd.checks.gpu_plan import Bundle, GpuNode, Unit
from async_opd.cluster.gpu_bundles import names
from async_opd.cluster.watching import Placement
from async_opd.waiting.waits import EVERY_S, Waits
from tests.world.clock import ManualTimer


def unit(pool: str, index: int = 0, gpus: int = 1) -> Unit:
    return Unit((Bundle(pool, index, gpus),))


S0, S1, SORT, REVERSE, TRAIN = (
    unit("rollout", 0),
    unit("rollout", 1),
    unit("teachers.sort"),
    unit("teachers.reverse"),
    unit("train"),
)


class Cluster:
    """Nodes with GPUs, and what Ray has placed there. Ray places those that wait as it likes."""

    def __init__(self, *units: Unit, **gpus: int) -> None:
        self.units = units
        self.gpus = gpus
        self.placed: dict[Unit, str | None] = dict.fromkeys(units)
        self.timer = ManualTimer()
        self.lines: list[str] = []
        waits = Waits(self.lines.append, self.timer, self.timer.clock)
        self.placement = Placement(self, (), self.lines.append, waits, self.nodes, names)
        self.ray_places(*units)

    def free(self, node: str) -> int:
        return self.gpus[node] - sum(u.gpus for u, at in self.placed.items() if at == node)

    def nodes(self) -> list[GpuNode]:
        return [
            GpuNode(node, node, gpus, self.free(node), marks=frozenset({f"at={node}"}))
            for node, gpus in self.gpus.items()
        ]

    def asked(self) -> dict[Unit, str | None]:
        return dict(self.placed)

    def create(self, unit: Unit) -> None:
        assert unit not in self.placed
        self.placed[unit] = None

    def remove(self, unit: Unit) -> None:
        del self.placed[unit]

    def ray_places(self, *first: Unit) -> None:
        for one in (*first, *self.units):
            if self.placed.get(one, "") is None:
                rooms = [node for node in self.gpus if self.free(node) >= one.gpus]
                self.placed[one] = rooms[0] if rooms else None

    def lose(self, node: str) -> None:
        del self.gpus[node]
        self.placed = {u: None if at == node else at for u, at in self.placed.items()}

    async def looks(self, times: int = 6) -> None:
        for index in range(times):
            await self.placement.look(changed=not index)
            self.ray_places()

    @property
    def served(self) -> set[Unit]:
        return {unit for unit, node in self.placed.items() if node is not None}


async def test_two_students_do_not_keep_the_gpu_that_the_only_replica_of_a_teacher_needs() -> None:
    cluster = Cluster(TRAIN, S0, S1, SORT, REVERSE, b=4, c=4)
    cluster.lose("b")
    cluster.ray_places(SORT, S0, S1)
    cluster.lose("c")
    cluster.gpus["d"] = 4
    cluster.ray_places(S0, S1, SORT, TRAIN)
    await cluster.looks()
    assert cluster.served == {TRAIN, SORT, REVERSE, S0}
    assert cluster.lines[1] == (
        "cluster: student/1 gives its GPUs to teacher reverse/0, without which the run cannot go on"
    )
    cluster.lose("d")
    cluster.gpus["e"] = 1
    cluster.ray_places(S0)
    await cluster.looks()
    assert cluster.served == {TRAIN}  # it comes before all others
    moved = Cluster(TRAIN, S0, b=2, c=2)
    moved.lose("b")
    await moved.looks()
    assert (moved.lines, moved.served) == ([], {TRAIN, S0})  # there is room elsewhere


async def test_who_gave_its_gpus_up_gets_others_when_a_machine_joins() -> None:
    cluster = Cluster(TRAIN, S0, S1, SORT, b=3, c=1)
    cluster.lose("c")
    cluster.gpus["c"] = 0
    await cluster.looks()
    assert SORT in cluster.served
    cluster.gpus["d"] = 1
    await cluster.looks()
    assert cluster.served == {TRAIN, S0, S1, SORT}


async def test_the_table_of_what_is_missing_is_said_once_and_who_waits_every_ten_seconds() -> None:
    cluster = Cluster(TRAIN, S0, S1, b=2, c=1)
    cluster.lose("c")
    await cluster.looks(5)
    (head, *table) = cluster.lines[0].splitlines()
    assert head.startswith(
        "cluster: GPUs are missing for student/1: the pools need 3 GPUs, each engine's on one "
        "node; the cluster has 2"
    )
    assert table[-1].split() == ["b", "2", "0"]
    assert len(cluster.lines) == 1
    cluster.timer.advance(EVERY_S)
    for _ in range(3):
        await cluster.placement.look(changed=False)
    assert cluster.lines[1:] == ["waiting for GPUs for student/1 (10 s so far, no bound)"]
    cluster.placement.close()


async def test_the_line_about_gpus_that_are_given_up_names_who_gets_them() -> None:
    cluster = Cluster(TRAIN, S0, S1, SORT, b=2, c=2)
    cluster.placed = {TRAIN: None, SORT: None, S0: "b", S1: "b"}
    cluster.gpus = {"b": 2, "c": 1}  # Ray has not put the trainer on c yet
    for changed in (True, False):
        await cluster.placement.look(changed)
    assert cluster.lines[1:] == [
        "cluster: student/1 gives its GPUs to teacher sort/0, without which the run cannot go on"
    ]
    cluster.placement.close()


async def test_who_waits_is_asked_once_more_after_a_change_that_ray_has_not_seen_yet() -> None:
    cluster = Cluster(TRAIN, S0, b=1, c=1)
    await cluster.placement.look(changed=True)
    cluster.lose("c")
    for _ in range(3):
        await cluster.placement.look(changed=False)
    assert [line.split(":")[0] for line in cluster.lines] == ["cluster"]
    cluster.placement.close()


@pytest.mark.parametrize("gpus", [1, 2, 3])
async def test_a_large_engine_gets_the_gpus_of_several_less_important_ones(gpus: int) -> None:
    large = unit("teachers.sort", gpus=gpus)
    others = [unit("rollout", index) for index in range(4)]
    cluster = Cluster(*others, large, b=4, c=gpus)
    cluster.lose("c")
    await cluster.looks()
    assert large in cluster.served
    assert len(cluster.served) == 1 + 4 - gpus


async def test_a_unit_gets_gpus_of_nodes_with_what_it_needs_only() -> None:
    """Those that are free elsewhere, or given up elsewhere, do not help it; they help others."""
    train = Unit((Bundle("train", 0, 1),), frozenset({"at=c"}))
    cluster = Cluster(train, S0, S1, SORT, b=2, c=2)
    cluster.placed = {train: None, S0: "b", S1: "c", SORT: "c"}
    for changed in (True, False):
        await cluster.placement.look(changed)
    assert set(cluster.placed) == {train, S0, SORT}
    cluster.placed[train] = "c"
    for changed in (True, False):
        await cluster.placement.look(changed)
    cluster.placement.close()
    assert cluster.placed[S1] is None
