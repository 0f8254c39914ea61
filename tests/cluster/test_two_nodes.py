"""GPUs are reserved and nodes compared on a Ray cluster of two nodes with eight pretended GPUs."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.checks import nodes
from async_opd.checks.gpu_plan import units
from async_opd.checks.resources import pools
from async_opd.cluster import actor_names
from async_opd.cluster.actor_factory import ActorFactory, Factories, Factory
from async_opd.cluster.actor_names import run_name
from async_opd.cluster.actor_shell import ActorPlacement
from async_opd.cluster.placement import reserving
from async_opd.cluster.placement.gpu_bundles import GpuBundles
from async_opd.cluster.placement.node_checks import check_nodes
from async_opd.cluster.placement.nodes import gpu_nodes
from async_opd.cluster.placement.reserving import cpu_places, reserve
from async_opd.cluster.remote import Remote
from async_opd.cluster.singleton_actors import TrainerActor
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, EngineStartError
from async_opd.models.engine_args import Device
from tests.world.config import changed, run_config
from tests.world.ray_cluster import ray_cluster

pytestmark = pytest.mark.engine

BOUND_S = 300.0
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "models" / "student"


class Engine:
    """Tells which GPUs its process may use."""

    def __init__(self, *args: Any) -> None:
        pass

    async def sleep(self) -> None:
        """It has no memory to free."""

    async def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


ENGINE = Factory(f"{__name__}:Engine")
NOTHING: Any = None


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes, each of which says that it has eight GPUs; the second has a setting of NCCL."""
    node = {"num_cpus": 1, "num_gpus": 8, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        other = {**node, "labels": {"market": "spot"}, "resources": {"reliable": 1}}
        with ray_cluster(node, {**other, "env_vars": {"NCCL_CUMEM_ENABLE": "0"}}):
            yield


def config(*, rollout: int = 4, ranks: int = 2, start_s: float = BOUND_S) -> RunConfig:
    """Two engines of the student with a colocated teacher each, one of another, and ranks."""
    colocated = {"placement": "colocated", "with": "rollout", "tensor_parallel": rollout}
    return run_config(
        teachers={
            "guest": {"model": "t", "replicas": 2, **colocated},
            "own": {"model": "t", "tensor_parallel": 2},
        },
        rollout={"replicas": 2, "tensor_parallel": rollout},
        train={"ranks": ranks},
        cluster={"address": "auto", "device": "cuda"},
        sync={"backend": "gloo"},
        timeouts={"engine_start_s": start_s},
    )


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """No size is read of the models that ``config()`` names: they are nowhere."""
    monkeypatch.setattr("async_opd.cluster.actor_factory.beside", lambda config, pool: 0)


async def all_free() -> None:
    async with asyncio.timeout(BOUND_S):
        while [node.free for node in gpu_nodes()] != [8, 8]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def give_back(bundles: GpuBundles) -> None:
    for unit in bundles.units:
        bundles.remove(unit)
    await all_free()


@asynccontextmanager
async def actors(
    given: RunConfig, device: Device = "cuda", **factories: Factory
) -> AsyncIterator[ActorFactory]:
    """Starts processes in the bundles of a config within the block."""
    bundles = await (reserve(given, print) if device == "cuda" else cpu_places(given))
    made = ActorFactory(given, device, (), Factories(**factories), print, bundles)
    try:
        yield made
    finally:
        for remote in made.started:
            remote.kill()
        await give_back(bundles)


@asynccontextmanager
async def others() -> AsyncIterator[None]:
    """Others use the GPUs of a node within the block."""
    group = placement_group([{"GPU": 8}], strategy="STRICT_PACK")
    await group.ready()
    try:
        yield
    finally:
        remove_placement_group(group)


async def place(remote: Remote) -> ActorPlacement:
    return await remote.place(BOUND_S)


async def test_hosts_guests_and_ranks_get_the_gpus_of_their_bundles(cluster: None) -> None:
    async with actors(config(), student=ENGINE, teacher=ENGINE) as factory:
        student, *rest = await asyncio.gather(
            factory.student(0, NOTHING),
            factory.create(actor_names.teacher("own", 0), gpus=2, bundle=("teachers.own", 0)),
            *(
                factory.create(actor_names.trainer(rank), gpus=1, bundle=("train", rank))
                for rank in range(2)
            ),
        )
        at = await place(student.remote)
        teacher, *ranks = [await place(other) for other in rest]
        guest = factory.colocated["teachers.guest"][0].remote
        assert [len(found.gpus) for found in (at, teacher, *ranks)] == [4, 2, 1, 1]
        assert len({rank.node for rank in ranks}) == 1
        taken = [(found.node, gpu) for found in (at, teacher, *ranks) for gpu in found.gpus]
        assert len(set(taken)) == len(taken)
        assert (await place(guest)).node == at.node
        assert await guest.call("gpus") == await student.remote.call("gpus") == ",".join(at.gpus)
        student.kill()
        again = await factory.student(0, NOTHING, 1)
        assert await place(again.remote) == at


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_ray_starts_processes_on_nodes_with_their_labels_and_resources(
    cluster: None, device: Device
) -> None:
    marks = {"labels": {"train": {"market": "spot"}}, "resources": {"teachers.own": ["reliable"]}}
    async with actors(changed(config(), cluster=marks), device) as made:
        gpus = int(device == "cuda")
        remotes = [
            await made.create(actor_names.trainer(0), gpus=gpus, bundle=("train", 0)),
            await made.create(
                actor_names.teacher("own", 0), gpus=2 * gpus, bundle=("teachers.own", 0)
            ),
        ]
        found = {(await place(remote)).node for remote in remotes}
    (there,) = [node["NodeID"] for node in ray.nodes() if "reliable" in node["Resources"]]
    assert found == {there}


async def test_one_teacher_has_the_gpus_of_two_hosts_on_one_node(cluster: None) -> None:
    given = config().model_dump(by_alias=True)
    wide = given["teachers"]["guest"] | {"replicas": 1, "tensor_parallel": 6}
    given["teachers"] = {"guest": wide}
    given["rollout"] |= {"tensor_parallel": 3}
    async with actors(RunConfig.model_validate(given), student=ENGINE, teacher=ENGINE) as made:
        students = await asyncio.gather(*(made.student(index, NOTHING) for index in range(2)))
        places = [await place(student.remote) for student in students]
        guest = made.colocated["teachers.guest"][0].remote
        assert places[0].node == places[1].node == (await place(guest)).node
        assert await guest.call("gpus") == ",".join((*places[0].gpus, *places[1].gpus))


async def test_a_student_on_the_trainers_gpu_starts_first_and_gets_it_again(cluster: None) -> None:
    given = config().model_dump(by_alias=True)
    given["teachers"] = {"own": given["teachers"]["own"]}
    colocated = {"placement": "colocated", "with": "train"}
    given["rollout"] |= {**colocated, "replicas": 1, "tensor_parallel": 1}
    given["train"] |= {"ranks": 1}
    async with actors(RunConfig.model_validate(given), student=ENGINE, trainer=ENGINE) as made:
        trainer = await TrainerActor.start(made, cast(Any, "queue"))
        at = await place(trainer.remote)
        student = made.colocated["rollout"][0]
        assert (await place(student.remote)).node == at.node
        assert await student.remote.call("gpus") == ",".join(at.gpus)
        student.kill()
        again = await made.student(0, NOTHING, 1)
        assert await again.remote.call("gpus") == ",".join(at.gpus)
        await trainer.end(30)
        await _built_again(trainer)
        assert await place(trainer.remote) == at


async def _built_again(trainer: Any, tries: int = 3) -> None:
    """As supervision does it: a call may still reach the process that ends."""
    for _ in range(tries - 1):
        with suppress(EngineStartError):
            return await trainer.build()
    return await trainer.build()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_singletons_are_on_the_trainers_node_for_good(cluster: None, device: Device) -> None:
    async with actors(config(), device) as made:
        names = (actor_names.QUEUE, actor_names.SCORER, actor_names.ROLLOUTER)
        singletons = [await made.create(name, restarts=True) for name in names]
        gpus = int(device == "cuda")
        trainer = await made.create(actor_names.trainer(0), gpus=gpus, bundle=("train", 0))
        before = await asyncio.gather(*map(place, singletons))
        for remote in singletons:
            remote.restart()
            build = partial(remote.build, f"{__name__}:Engine", (), BOUND_S)
            await _built_again(SimpleNamespace(build=build))
        after = await asyncio.gather(*map(place, singletons))
        assert {found.node for found in (*before, *after)} == {(await place(trainer)).node}
        assert not {found.process for found in before} & {found.process for found in after}


async def test_gpus_of_others_are_waited_for(cluster: None) -> None:
    words: asyncio.Queue[str] = asyncio.Queue()
    async with others():
        waiting = asyncio.create_task(reserve(config(), words.put_nowait))
        first = await asyncio.wait_for(words.get(), BOUND_S)
    await give_back(await asyncio.wait_for(waiting, BOUND_S))
    assert first.startswith("cluster: waiting for GPUs that others use")


async def test_of_two_runs_that_start_at_the_same_moment_each_gets_all_of_its_gpus_or_none(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looks at the cluster before Ray has given the first one its GPUs."""
    first = await reserve(config(), print)
    monkeypatch.setattr(reserving, "TOGETHER_S", 0.5)
    looks = [[replace(node, free=8) for node in gpu_nodes()]]
    monkeypatch.setattr(reserving, "gpu_nodes", lambda: looks.pop() if looks else gpu_nodes())
    lines: list[str] = []
    waits = asyncio.Event()

    def notify(line: str) -> None:
        lines.append(line)
        if "GPUs that others use" in line:
            waits.set()

    other = config().model_copy(update={"run_dir": "other"})
    waiting = asyncio.create_task(reserve(other, notify))
    await asyncio.wait_for(waits.wait(), BOUND_S)
    assert lines[0].startswith("cluster: another run took some of the GPUs")
    assert sum(node.free for node in gpu_nodes()) == 16 - 12  # it has none of them meanwhile
    for unit in first.units:
        first.remove(unit)
    await give_back(await asyncio.wait_for(waiting, BOUND_S))


async def test_processes_on_cpus_are_spread_over_the_nodes(cluster: None) -> None:
    """Two of the student, one of the teacher that has no host, and two ranks."""
    names = {
        ("rollout", 0): actor_names.student(0),
        ("rollout", 1): actor_names.student(1),
        ("teachers.own", 0): actor_names.teacher("own", 0),
        ("train", 0): actor_names.trainer(0),
        ("train", 1): actor_names.trainer(1),
    }
    async with actors(config(), "cpu") as made:
        processes = [await made.create(name, bundle=bundle) for bundle, name in names.items()]
        found = Counter([(await place(process)).node for process in processes])
        assert sorted(found.values()) == [2, 3]


async def test_gpus_that_others_use_are_asked_for_where_machines_may_come(cluster: None) -> None:
    """As placement groups, for which an autoscaler starts machines."""
    given = changed(config(), cluster={"wait_s": BOUND_S})
    asking = GpuBundles(run_name(given), tuple(units(pools(given))))
    async with others():
        waiting = asyncio.create_task(reserve(given, print))
        async with asyncio.timeout(BOUND_S):
            while None not in asking.asked().values():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    await give_back(await asyncio.wait_for(waiting, BOUND_S))


async def test_gpus_that_others_do_not_give_back_are_a_shortage(cluster: None) -> None:
    async with others():
        with pytest.raises(ConfigError, match=r"need 12 GPUs.*has 16, of which 8 are free"):
            await reserve(config(start_s=0.5), print)
    await all_free()


async def test_a_cluster_without_a_node_for_the_largest_engine_is_refused(cluster: None) -> None:
    with pytest.raises(ConfigError) as refused:
        await reserve(config(rollout=9, ranks=1), pytest.fail)
    head, *rows = refused.value.problems[0].message.splitlines()
    assert head.startswith("the pools need 21 GPUs, each engine's on one node; the cluster has 16")
    assert [row.split()[-2:] for row in rows[-2:]] == [["8", "8"]] * 2
    await all_free()


def on(run_dir: Path, model: str) -> RunConfig:
    """A run with one model for all."""
    given = config().model_dump(by_alias=True)
    given["run_dir"], given["student"]["model"] = str(run_dir), model
    for teacher in given["teachers"].values():
        teacher["model"] = model
    return RunConfig.model_validate(given)


async def test_all_that_is_wrong_with_nodes_is_found_before_an_engine_starts(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes start in another directory than the driver's, where no model is."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nodes, "MIN_SHM_MIB", 1 << 40)
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    with pytest.raises(ConfigError) as refused:
        await check_nodes(on(tmp_path / "run", "model"), "cuda")
    problems = {(one.key, one.message.partition(" ")[0]) for one in refused.value.problems}
    assert problems == {
        ("student.model", "model"),
        ("cluster.address", "NCCL_CUMEM_ENABLE"),
        ("cluster.address", "/dev/shm"),
    }


async def test_nodes_that_agree_are_accepted_and_a_later_one_that_differs_gets_no_process(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MIN_SHM_MIB", 0)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # the second node gets this, too
    joined = on(tmp_path, str(QUICKSTART))
    await check_nodes(joined, "cuda")
    assert os.listdir(tmp_path) == []
    compared = await check_nodes(joined, "cpu")
    assert compared is not None
    (later,) = [
        node["NodeID"] for node in ray.nodes() if "node:__internal_head__" not in node["Resources"]
    ]
    compared.ids -= {later}
    there = NodeAffinitySchedulingStrategy(later, soft=False)
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    remote = Remote.create("engine", timeout_s=BOUND_S, bundle=there)
    remote.compare_node = compared.compare
    with pytest.raises(EngineStartError, match="NCCL_CUMEM_ENABLE is 1 on the driver's node, 0"):
        await remote.build(f"{__name__}:Engine", (), BOUND_S)
    remote.kill()
    assert (
        await GpuBundles().strategy("student/0", "rollout", 0) is None
    )  # without bundles Ray chooses
