"""A node of a Ray cluster is lost: what its processes say of it, and the head is waited for."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.checks.resources import gpus_of_cluster
from async_opd.cluster.actor_factory import ActorFactory, Factories, Factory
from async_opd.cluster.launch import _started
from async_opd.cluster.placement.by_importance import Placement
from async_opd.cluster.placement.gpu_bundles import names
from async_opd.cluster.placement.nodes import gpu_nodes
from async_opd.cluster.placement.reserving import reserve
from async_opd.cluster.remote import Remote
from async_opd.cluster.rollouter_replicas import RollouterActor
from async_opd.cluster.singleton_actors import TrainerActor
from async_opd.cluster.watching import ClusterWatch
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import (
    ConfigError,
    Displaced,
    EngineStartError,
    ProcessDied,
    StageError,
)
from async_opd.waiting.deadline import race
from async_opd.waiting.waits import Waits
from tests.cluster.simulated import FACTORIES as SIMULATED
from tests.cluster.simulated import config as simulated_config
from tests.world.config import run_config
from tests.world.ray_cluster import ray_cluster

pytestmark = pytest.mark.engine

BOUND_S = 300.0


class Engine:
    """It works, or cannot start."""

    def __init__(self, fails: bool = False, dies: bool = False) -> None:
        if fails:
            raise RuntimeError("no such model")
        if dies:
            print("MemoryError: none left", file=sys.stderr, flush=True)
            os._exit(1)

    async def answer(self) -> int:
        return 42

    async def die(self) -> None:
        os._exit(1)


ENGINE = f"{__name__}:Engine"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and a second node."""
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with ray_cluster(node, node) as cluster:
        yield cluster


async def test_a_process_of_a_lost_node_is_displaced_after_the_heads_verdict(cluster: Any) -> None:
    (second,) = [node for node in cluster.list_all_nodes() if not node.is_head()]
    remote = Remote.create("engine", timeout_s=BOUND_S, bundle=on_the_second_node(cluster))
    await remote.build(ENGINE, (), BOUND_S)
    assert (await remote.call("answer"), await remote.displaced()) == (42, None)
    cluster.remove_node(second, allow_graceful=False)
    displaced = await asyncio.wait_for(remote.displaced(), 2 * BOUND_S)
    assert isinstance(displaced, Displaced)
    assert "is lost: health check failed" in displaced.cause
    with pytest.raises(ProcessDied, match=r"engine: .* is lost: .*, during answer"):
        await remote.call("answer", timeout_s=BOUND_S)


async def test_a_process_that_fails_on_a_node_that_lives_is_not_displaced(cluster: Any) -> None:
    remote = Remote.create("engine", timeout_s=BOUND_S)
    with pytest.raises(EngineStartError, match="no such model"):
        await remote.build(ENGINE, (True,), BOUND_S)


def on_the_second_node(cluster: Any) -> NodeAffinitySchedulingStrategy:
    (second,) = [node for node in cluster.list_all_nodes() if not node.is_head()]
    return NodeAffinitySchedulingStrategy(second.node_id, soft=False)


async def test_the_last_lines_of_a_process_that_dies_at_its_start_come_from_its_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own logs have no line of it."""
    driver = ray._private.worker._global_node
    monkeypatch.setattr(driver, "get_logs_dir_path", lambda: str(tmp_path))
    remote = Remote.create("engine", timeout_s=BOUND_S, bundle=on_the_second_node(cluster))
    with pytest.raises(EngineStartError, match=r"died(?s:.*)lines:\n *MemoryError: none left"):
        await remote.build(ENGINE, (False, True), BOUND_S)


async def test_a_process_that_dies_on_one_of_several_nodes_names_it(cluster: Any) -> None:
    remote = Remote.create("engine", timeout_s=BOUND_S, bundle=on_the_second_node(cluster))
    await remote.build(ENGINE, (), BOUND_S)
    name = socket.gethostname()
    with pytest.raises(ProcessDied, match=rf"^engine: on {name} \([\d.]+\): its process died"):
        await remote.call("die")


GPUS = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 << 20}


async def test_a_cluster_says_how_many_gpus_it_has(cluster: Any) -> None:
    assert gpus_of_cluster(cluster.address, BOUND_S) == 0
    cluster.add_node(num_cpus=1, num_gpus=3, object_store_memory=80 << 20)
    assert gpus_of_cluster(cluster.address, BOUND_S) == 3


def test_a_cluster_that_is_not_there_is_an_error_with_a_remedy() -> None:
    with pytest.raises(StageError, match=r"127.0.0.1:9' did not answer within 3 s") as error:
        gpus_of_cluster("127.0.0.1:9", 3)
    assert error.value.remedy.startswith("check cluster.address")


class Guest:
    """Tells which GPUs its process may use."""

    def __init__(self, *args: Any) -> None:
        pass

    async def sleep(self) -> None:
        """It has no memory to free."""

    async def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


COLOCATED = {"placement": "colocated", "with": "train", "replicas": 1}
GUEST = Factory(f"{__name__}:Guest")


@pytest.mark.long
async def test_a_student_and_a_teacher_move_with_the_rank_whose_gpu_they_share(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.cluster.actor_factory.beside", lambda config, pool: 0)
    first, second = [cluster.add_node(**GPUS) for _ in range(2)]
    given = run_config(
        rollout=COLOCATED,
        teachers={"t": {"model": "t"} | COLOCATED | {"with": "rollout"}},
        cluster={"address": "auto", "device": "cuda"},
        sync={"backend": "gloo"},
        timeouts={"engine_start_s": BOUND_S},
    )
    bundles = await reserve(given, print)
    factories = Factories(student=GUEST, teacher=GUEST, trainer=GUEST)
    made = ActorFactory(given, "cuda", (), factories, print, bundles)
    queue: Any = "queue"
    trainer = await TrainerActor.start(made, queue)
    guests = [made.colocated[pool][0] for pool in ("rollout", "teachers.t")]
    at = await trainer.remote.place(BOUND_S)
    places = bundles.places(given, "teachers.t")
    assert places is not None
    cluster.remove_node(first if at.node == first.node_id else second, allow_graceful=False)
    async with asyncio.timeout(2 * BOUND_S):
        lost = [await guest.displaced() for guest in guests]
        await places.placed(0)
        await trainer.build()
    assert None not in lost
    moved = await trainer.remote.place(BOUND_S)
    assert moved.node in {first.node_id, second.node_id} - {at.node}
    for guest in guests:
        guest.kill()
    again = [await made.student(0, queue, 1), await made.teacher("t", 0)]
    for one in again:
        assert (await one.remote.place(BOUND_S)).node == moved.node
        assert await one.remote.call("gpus") == ",".join(moved.gpus)
    trainer.remote.kill()  # a guest finds the GPUs of a host that is dead
    again[1].kill()
    last = await made.teacher("t", 0)
    assert await last.remote.call("gpus") == ",".join(moved.gpus)


def config(wait_s: float = 0) -> RunConfig:
    """Four GPUs: two students, a teacher and the trainer."""
    cluster = {"address": "auto", "device": "cuda", "wait_s": wait_s}
    return run_config(rollout={"replicas": 2}, cluster=cluster)


async def test_machines_that_join_later_are_waited_for_and_then_refused(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"need 4 GPUs(?s:.*)cluster\.wait_s"):
        await reserve(config(wait_s=0.5), print)
    lines: list[str] = []
    said = asyncio.Event()

    def notify(line: str) -> None:
        lines.append(line)
        said.set()

    waiting = asyncio.create_task(reserve(config(wait_s=BOUND_S), notify))
    await asyncio.wait_for(said.wait(), BOUND_S)
    for _ in range(2):
        cluster.add_node(**GPUS)
    bundles = await asyncio.wait_for(waiting, 2 * BOUND_S)
    assert lines[0].startswith("cluster: waiting for machines: the pools need 4 GPUs")
    assert None not in bundles.asked().values()


async def test_gpus_left_after_a_loss_go_to_the_trainer_and_the_only_teacher(cluster: Any) -> None:
    second, third = [cluster.add_node(**GPUS) for _ in range(2)]
    bundles = await reserve(config(wait_s=BOUND_S), print)
    lines: list[str] = []
    waits = Waits(lines.append)
    placement = Placement(bundles, (), lines.append, waits, gpu_nodes, names)
    placed = bundles.asked()
    trainers = placed[next(unit for unit in bundles.units if unit.pool == "train")]
    lost = second if trainers == second.node_id else third
    cluster.remove_node(lost, allow_graceful=False)
    async with asyncio.timeout(2 * BOUND_S):
        while {names(u) for u, at in bundles.asked().items() if at} != {"trainer", "teacher t/0"}:
            await placement.look(changed=True)
            await asyncio.sleep(0.5)
    placement.close()
    assert any(line.startswith("cluster: GPUs are missing for") for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("pool", ["train", "rollout"])
async def test_a_machine_that_is_lost_when_all_is_started_is_replaced_before_the_run_or_in_it(
    cluster: Any, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the trainer's nothing can be done: the start begins again. A student comes later."""
    gpus = GPUS | {"resources": {"reliable": 1}}
    for node in (gpus, GPUS, gpus if pool == "train" else GPUS):
        cluster.add_node(**node)
    marks = {"address": "auto", "device": "cuda", "resources": {"train": ["reliable"]}}
    one = {"replicas": 1, "engine": {"max_num_seqs": 16}}
    given = simulated_config(
        tmp_path,
        rollout=one | {"n": 1, "max_tokens": 64},
        teachers={"t": one | {"model": "simulated"}},
        cluster=marks,
        sync={"backend": "gloo", "timeout_s": 10},
        timeouts={"engine_start_s": BOUND_S},
    )
    monkeypatch.setattr("async_opd.cluster.actor_factory.beside", lambda config, pool: 0)
    monkeypatch.setattr("async_opd.cluster.launch.stored_from", lambda *given: None)
    start, lines, lost = RollouterActor.start, list[str](), list[str]()
    bundles = await reserve(given, print)
    made = ActorFactory(given, "cuda", (), SIMULATED, lines.append, bundles)

    async def loses(*stages: Any) -> RollouterActor:
        monkeypatch.setattr(RollouterActor, "start", start)
        _, _, (student,), _, trainer, _ = stages
        process = trainer.remote if pool == "train" else student.remote
        lost.append(process.node)
        (node,) = [one for one in cluster.list_all_nodes() if one.node_id in lost]
        cluster.remove_node(node, allow_graceful=False)
        await process.end()
        return await start(*stages)

    monkeypatch.setattr(RollouterActor, "start", loses)
    waits = Waits(lines.append)
    placement = Placement(bundles, (), lines.append, waits, gpu_nodes, names)
    watch = ClusterWatch(lines.append, placement)
    try:
        stages = await asyncio.wait_for(race(watch.run(), _started(made, watch)), 3 * BOUND_S)
        again = [line for line in lines if "the start begins again" in line]
        assert bool(again) == (pool == "train")
        assert stages.singletons.trainer.remote.node not in lost
    finally:
        await made.close()
