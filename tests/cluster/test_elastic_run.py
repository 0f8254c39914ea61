"""Pools of a run follow its cluster: a node joins and drains, the trainer's node is lost.

Engines and learner only take time; GPUs are pretended ones.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from async_opd.accounting.audit import audit
from tests.cluster.test_run import BOUND_S, Run, Running
from tests.world.ray_cluster import ray_cluster

pytestmark = [pytest.mark.engine, pytest.mark.long]

GPUS = {"num_cpus": 1, "num_gpus": 3, "object_store_memory": 80 << 20}
TEACHER = "{model: quickstart/models/teacher-sort, sources: [sort, reverse], replicas: %s}"
SIMULATED = [
    "train={steps: 1000000, batch_size: 16}",
    "eval={every: 0, before: false, teachers: false}",
    "sync={verify_every: 0}",
    "checkpoint.every_steps=20",
    "checkpoint.every=null",
    "rollout.n=1",
    "rollout.replicas={min: 1, max: 4}",
    f"teachers={{sort: {TEACHER % '{min: 1, max: 2}'}}}",
    "cluster.device=cuda",
]
COUNTED = (
    *("rollout/replicas", "teacher/sort/serving"),
    *("teacher/sort/failures", "teacher/sort/retries", "teacher/sort/dead_letters"),
)
Counts = dict[str, list[float]]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Counts]]:
    """The run, and its counts until after the drain."""
    directory = tmp_path_factory.mktemp("runs") / "elastic"
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with ray_cluster(node, GPUS) as cluster:
        (first,) = [one for one in cluster.list_all_nodes() if not one.is_head()]
        joined = f"cluster.address={cluster.address}"
        running = Running(directory, *SIMULATED, joined, program=("tests.cluster.simulated",))
        running.until("everything is up")
        second = cluster.add_node(**GPUS)
        for name in ("student/1", "student/2", "teacher sort/1"):
            running.until(f"{name} is rebuilt")
        until_reported(running, "teacher/sort/serving", 2)
        until_reported(running, "rollout/replicas", 3)
        drain(second.node_id)
        running.until("cluster: rollout shrinks to 1 of 1–4 replicas")
        running.until("cluster: teachers.sort shrinks to 1 of 1–2 replicas")
        drained = Run(0, "", directory, [])
        counts = {key: drained.values(key) for key in COUNTED}
        cluster.add_node(**GPUS)
        running.until("cluster: rollout grows to 3 of 1–4 replicas", times=2)
        cluster.remove_node(first, allow_graceful=False)
        running.until("trainer is rebuilt")
        running.until("checkpoint of step", running.read().count("checkpoint of step") + 2)
        running.process.send_signal(signal.SIGINT)
        yield running.end(), counts


def until_reported(running: Running, key: str, value: float) -> None:
    """Waits for a row with such a metric; they are reported every few steps."""
    deadline = time.monotonic() + BOUND_S
    while value not in Run(0, "", running.directory, []).values(key):
        assert running.process.poll() is None, running.read()
        assert time.monotonic() < deadline, running.read()
        time.sleep(0.2)


def drain(node: str) -> None:
    reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    until = int((time.time() + 300) * 1000)
    gcs = ray._private.worker.global_worker.gcs_client
    assert gcs.drain_node(node, reason, "the market", until) == (True, "")


def test_every_sample_of_it_is_accounted_for(lived: tuple[Run, Counts]) -> None:
    run, _ = lived
    assert (run.code, run.summary["status"]) == (130, "interrupted"), run.output
    found = audit(run.directory)
    assert (found.lost, found.duplicated, found.dead_lettered) == ((), (), ())


def test_no_try_is_burned_and_nothing_is_gone_for_good(lived: tuple[Run, Counts]) -> None:
    log = (lived[0].directory / "run.log").read_text()
    assert "is gone for good" not in log
    assert not [line for line in log.splitlines() if "is being rebuilt in" in line]


def test_pools_grow_onto_a_new_node_and_a_drained_one_costs_no_call(
    lived: tuple[Run, Counts],
) -> None:
    most = {key: max(values) for key, values in lived[1].items()}
    assert most == {**dict.fromkeys(COUNTED, 0), "rollout/replicas": 3, "teacher/sort/serving": 2}
