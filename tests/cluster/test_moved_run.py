"""The machine of a student and of the teacher on its GPU is lost: both move to another one.

Engines and learner only take time; GPUs are pretended ones.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from async_opd.accounting.audit import audit
from tests.cluster.test_elastic_run import SIMULATED
from tests.cluster.test_run import Run, Running
from tests.world.ray_cluster import ray_cluster

pytestmark = [pytest.mark.engine, pytest.mark.long]

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
GPU = NODE | {"num_gpus": 1}
TEACHER = "{model: quickstart/models/teacher-sort, sources: [sort, reverse], %s}"
COLOCATED = (
    *(one for one in SIMULATED if not one.startswith(("rollout.replicas", "teachers"))),
    f"teachers={{sort: {TEACHER % 'placement: colocated, with: rollout'}}}",
    *("cluster.resources={train: [reliable]}", "cluster.gpu_memory_gib=80"),
)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("runs") / "moved"
    with ray_cluster(NODE, GPU | {"resources": {"reliable": 1}}) as cluster:
        lost = cluster.add_node(**GPU)
        joined = f"cluster.address={cluster.address}"
        running = Running(directory, *COLOCATED, joined, program=("tests.cluster.simulated",))
        running.until("checkpoint of step")
        cluster.add_node(**GPU)
        cluster.remove_node(lost, allow_graceful=False)
        running.until("student/0 is rebuilt")
        running.until("teacher sort/0 is rebuilt")
        running.until("checkpoint of step", running.read().count("checkpoint of step") + 3)
        running.process.send_signal(signal.SIGINT)
        return running.end()


def test_every_sample_of_it_is_accounted_for(moved: Run) -> None:
    assert (moved.code, moved.summary["status"]) == (130, "interrupted"), moved.output
    found = audit(moved.directory)
    assert (found.lost, found.duplicated, found.dead_lettered) == ((), (), ())


def test_no_try_is_burned_and_the_trainer_stays(moved: Run) -> None:
    log = Path(moved.directory / "run.log").read_text()
    assert "is gone for good" not in log
    assert not [line for line in log.splitlines() if "is being rebuilt in" in line]
    assert "the run goes on after step" not in log
