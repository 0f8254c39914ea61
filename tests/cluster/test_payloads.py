"""Payloads in Ray's object stores: which deaths lose them, and a run that loses their node."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.accounting.audit import audit
from async_opd.cluster.payloads.stores import NodeStore, NodeStores
from async_opd.cluster.remote import Remote
from async_opd.core.errors import StageError
from tests.cluster.simulated import HURRY
from tests.cluster.test_run import Run, Running
from tests.world.ray_cluster import ray_cluster

pytestmark = pytest.mark.engine

BOUND_S = 300.0
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
SIZE = 4 << 20


class Replica:
    """Hands payloads over, and can do nothing else."""

    async def hand_over(self, store: NodeStore, count: int) -> list[int]:
        return await store.put([np.full(SIZE, index, np.uint8) for index in range(count)])


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and a second node."""
    with ray_cluster(NODE, NODE) as cluster:
        yield cluster


def second(cluster: Any) -> Any:
    (found,) = [node for node in cluster.list_all_nodes() if not node.is_head()]
    return found


async def there(store: NodeStore, numbers: list[int]) -> list[int | None]:
    """The values of the payloads that are there."""
    found = await store.fetch(numbers)
    return [None if one is None else int(one[0]) for one in found if one is None or len(one)]


async def test_a_payload_outlives_its_replica_and_not_its_node(cluster: Any) -> None:
    node = second(cluster).node_id
    stores = NodeStores("run", {}, 600, BOUND_S, BOUND_S)
    store = await stores.open(node)
    assert await stores.open(node) == store
    replica = Remote.create(
        "teacher t/0",
        timeout_s=BOUND_S,
        bundle=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    await replica.build(f"{__name__}:Replica", (), BOUND_S)
    numbers = await replica.call("hand_over", store, 3)
    store.settle(numbers[:2], numbers[2:])
    replica.kill()
    async with asyncio.timeout(BOUND_S):
        while await there(store, numbers) != [0, 1, None]:  # noqa: ASYNC110 - a drop is later
            await asyncio.sleep(0.2)
    cluster.remove_node(second(cluster), allow_graceful=False)
    async with asyncio.timeout(BOUND_S):
        while numbers:  # its processes end after their raylet
            numbers = [one for one in numbers if await there(store, [one]) != [None]]
            await asyncio.sleep(0.2)


async def test_a_store_that_dies_has_lost_its_payloads_and_another_one_is_opened(
    cluster: Any,
) -> None:
    node = second(cluster).node_id
    stores = NodeStores("run", {}, 600, BOUND_S, BOUND_S)
    store = await stores.open(node)
    numbers = await store.put([np.zeros(SIZE, np.uint8)])
    stores.close()
    assert await there(store, numbers) == [None]
    with pytest.raises(StageError):
        await store.put([np.zeros(SIZE, np.uint8)])
    other = await stores.open(node)
    assert other != store
    assert await there(other, await other.put([np.ones(SIZE, np.uint8)])) == [1]


TEACHERS = "cluster.resources={teachers.sort: [teacher], teachers.reverse: [teacher]}"
SIMULATED = [
    "train={steps: 200, batch_size: 16}",
    "eval={every: 0, before: false, teachers: false}",
    "data.eval=[]",
    "sync={verify_every: 0}",
    "rollout.n=1",
    "queue.payloads=reference",
    "cluster.device=cpu",
    "plan.train.overhead_s=3",
    "async.staleness_threshold=2",  # the trainer leases two batches, and others wait behind them
    "checkpoint.every=null",
    "checkpoint.every_steps=2",
    TEACHERS,
]


def until_scored(directory: Path) -> None:
    """Waits for a step that has just ended with two batches of scores behind those leased."""
    run, deadline = Run(0, "", directory, []), time.monotonic() + BOUND_S
    while not any(row.get("queue/scored/ready", 0) >= 32 for row in run.metrics[-1:]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose teachers' node is lost, with all scores on it; another one joins."""
    teachers = {**NODE, "resources": {"teacher": 1}}
    with pytest.MonkeyPatch.context() as patch, ray_cluster(NODE, teachers, joined=False) as made:
        patch.setenv("PYTHONPATH", os.getcwd())  # for the simulated engines
        running = Running(
            tmp_path_factory.mktemp("runs") / "lost",
            *SIMULATED,
            f"cluster.address={made.address}",
            program=("tests.cluster.simulated",),
        )
        running.until("checkpoint of step")
        until_scored(running.directory)
        made.remove_node(second(made), allow_graceful=False)
        made.add_node(**teachers)
        (running.directory / HURRY).touch()
        return running.end()


@pytest.mark.long
def test_what_a_lost_node_had_is_scored_again_and_everything_is_trained_once(lost: Run) -> None:
    assert (lost.code, lost.summary["status"]) == (0, "completed"), lost.output
    log = Path(lost.directory / "run.log").read_text()
    assert "samples are scored again: their scores" in log
    found = audit(str(lost.directory))
    assert (found.lost, found.duplicated, found.dead_lettered) == ((), (), ())
    assert len(found.trained) == len(set(found.trained)) == 200 * 16
