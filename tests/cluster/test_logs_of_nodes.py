"""Output of processes on another node of a cluster comes to the driver, and into errors."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.cluster.remote import Remote
from async_opd.cluster.session import LOGS, ray_session
from tests.world.config import run_config
from tests.world.ray_cluster import ray_cluster

pytestmark = pytest.mark.engine

BOUND_S = 300.0


class Talks:
    """Writes an error, and is killed."""

    async def say(self) -> None:
        print("an error that explains it", file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with ray_cluster(node, node, joined=False) as cluster:
        yield cluster.address


async def test_a_process_that_dies_on_another_node_is_quoted_and_its_lines_are_kept(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.cluster.remote.LAST_LINES_S", BOUND_S)
    config = run_config(run_dir=str(tmp_path), cluster={"address": address})
    words = ""
    async with ray_session(config, print):
        here = ray.get_runtime_context().get_node_id()
        (there,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
        place = NodeAffinitySchedulingStrategy(there, soft=False)
        remote = Remote.create("student/0", timeout_s=BOUND_S, bundle=place)
        await remote.build(f"{__name__}:Talks", (), BOUND_S)
        await remote.call("say")
        pid = await remote.pid(BOUND_S)
        os.kill(pid, signal.SIGKILL)
        error = await asyncio.wait_for(remote.end(), BOUND_S)
        assert "an error that explains it" in error.cause
        async with asyncio.timeout(BOUND_S):
            while "an error that explains it" not in words:  # Ray sends a file line by line
                await asyncio.sleep(0.1)
                files = (tmp_path / LOGS).glob(f"node-*/worker-{pid}.err")
                words = "".join(file.read_text() for file in files)
    assert "this is the log of student/0" in words
