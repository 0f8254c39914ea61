"""Machines with GPUs are lost: who waits is said, and the most important processes come first."""

from __future__ import annotations

import pytest

from async_opd.checks.gpu_plan import Bundle, GpuNode, Unit
from async_opd.cluster.placement.by_importance import Placement
from async_opd.cluster.placement.gpu_bundles import names
from async_opd.core.errors import StageError
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
        self.differs: set[str] = set()
        self.unread: set[str] = set()
        self.placed: dict[Unit, str | None] = dict.fromkeys(units)
        self.timer = ManualTimer()
        self.lines: list[str] = []
        waits = Waits(self.lines.append, self.timer, self.timer.clock)
        given = (self.lines.append, waits, self.nodes, names, self.compare)
        self.placement = Placement(self, (), *given)
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

    def create(self, unit: Unit, node: str | None = None) -> None:
        assert unit not in self.placed
        self.placed[unit] = None

    def remove(self, unit: Unit) -> None:
        del self.placed[unit]

    async def compare(self, node: str) -> None:
        if node in self.unread:
            raise OSError(28, "No space left on device")
        if node in self.differs:
            raise StageError("cluster", "its node differs: vllm is 0.31")

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


async def test_processes_without_gpus_wait_for_machines_with_what_their_pool_needs() -> None:
    cluster = Cluster(Unit((Bundle("rollout", 0, 0),), frozenset({"samples"})), b=0)
    cluster.lose("b")
    await cluster.looks()
    assert cluster.lines == [
        "cluster: machines are missing for student/0: the cluster has none with samples"
    ]
    cluster.placement.close()


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


def elastic(pool: str, least: int, most: int) -> list[Unit]:
    return [Unit((Bundle(pool, index, 1),), least=least) for index in range(most)]


STUDENTS, TEACHERS = elastic("rollout", 1, 4), elastic("teachers.sort", 1, 2)


def growing(**gpus: int) -> Cluster:
    """A cluster whose run has what it needs: one replica each, and the trainer."""
    cluster = Cluster(TRAIN, *STUDENTS, *TEACHERS, **gpus)
    needed = (TRAIN, STUDENTS[0], TEACHERS[0])
    cluster.placed = dict.fromkeys(needed)
    cluster.ray_places(*needed)
    return cluster


async def test_pools_grow_in_turn_when_a_machine_joins_and_shrink_with_it() -> None:
    cluster = growing(b=3)
    await cluster.looks()
    assert cluster.lines == [
        "cluster: rollout has 1 of 1–4 replicas: student/0 on b",
        "cluster: teachers.sort has 1 of 1–2 replicas: teacher sort/0 on b",
    ]
    cluster.gpus["c"] = 3
    await cluster.looks()
    assert cluster.served == {TRAIN, *STUDENTS[:3], *TEACHERS}
    assert cluster.lines[2:] == [
        "cluster: rollout grows to 3 of 1–4 replicas: student/1 on c, student/2 on c",
        "cluster: teachers.sort grows to 2 of 1–2 replicas: teacher sort/1 on c",
    ]
    cluster.lose("c")
    await cluster.looks()
    assert cluster.placed.keys() == {TRAIN, STUDENTS[0], TEACHERS[0]}  # no unit waits for more
    assert cluster.lines[4:] == [
        "cluster: rollout shrinks to 1 of 1–4 replicas: student/1 has left c, student/2 has left c",
        "cluster: teachers.sort shrinks to 1 of 1–2 replicas: teacher sort/1 has left c",
    ]


async def test_replicas_beyond_the_least_give_their_gpus_to_the_trainer_first() -> None:
    cluster = growing(b=1, c=5)
    await cluster.looks()
    trainers = cluster.placed[TRAIN]
    cluster.lose(str(trainers))
    await cluster.looks(12)
    assert {TRAIN, TEACHERS[0]} <= cluster.served or len(cluster.gpus) == 0
    assert sum(unit in cluster.served for unit in STUDENTS) >= 1


async def test_a_replica_that_stays_covers_for_one_of_the_first_that_is_lost() -> None:
    cluster = growing(b=3)
    cluster.gpus["c"] = 1
    await cluster.looks()
    cluster.placed[STUDENTS[0]] = None
    cluster.gpus["b"] = 2
    await cluster.looks()
    assert cluster.served == {TRAIN, STUDENTS[1], TEACHERS[0]}
    assert not any("missing" in line for line in cluster.lines)


async def test_no_pool_grows_on_a_node_that_differs_which_is_said_once() -> None:
    cluster = growing(b=3)
    cluster.differs = {"c"}
    cluster.gpus["c"] = 3
    await cluster.looks(12)
    assert cluster.served == {TRAIN, STUDENTS[0], TEACHERS[0]}
    assert [line for line in cluster.lines if "differs" in line] == [
        "cluster: no pool grows on c: cluster: its node differs: vllm is 0.31"
    ]


async def test_a_node_that_cannot_be_compared_ends_no_run() -> None:
    cluster = growing(b=3)
    cluster.unread = {"c"}
    cluster.gpus["c"] = 3
    await cluster.looks(12)
    assert "cluster: no pool grows on c: [Errno 28] No space left on device" in cluster.lines


async def test_a_unit_on_a_node_that_is_not_known_yet_is_said_without_its_name() -> None:
    cluster = growing(b=3)
    await cluster.looks()
    cluster.placed[STUDENTS[1]] = "gone by now"
    await cluster.looks()
    assert any("student/1 on a lost node" in line for line in cluster.lines)


async def test_who_gets_gpus_without_being_the_only_one_of_its_pool_only_comes_first() -> None:
    students = elastic("rollout", 2, 2)
    cluster = Cluster(TRAIN, *students, *TEACHERS, b=4)
    cluster.placed = {TRAIN: "b", students[0]: "b", students[1]: None} | dict.fromkeys(
        TEACHERS, "b"
    )
    for changed in (True, False):
        await cluster.placement.look(changed)
    assert "cluster: teacher sort/1 gives its GPUs to student/1, which comes first" in cluster.lines
    cluster.placement.close()
