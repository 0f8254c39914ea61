"""The nodes of a cluster, as Ray's head knows them; it has the verdict on one that is silent.

a member fails ──► its node answers: the member's own failure
              └──► its node is silent ──► the head's verdict, some 15 s later: the node is lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray

from async_opd.checks.gpu_plan import GpuNode
from async_opd.core.errors import StageError, StageTimeout
from async_opd.waiting.deadline import Bound, Deadline, Timer

ANSWER_S = 5.0
"""Seconds in which the head has to answer, and a node to accept a connection."""
VERDICT_S = 90.0
"""Longest wait for the verdict. Ray's head asks a node every 3 s, and gives it up after five
questions in a row that failed, each after at most 10 s."""
POLL_S = 1.0


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


def gpu_nodes() -> list[GpuNode]:
    """``cluster_nodes`` with GPUs; if none has any, all of them."""
    return with_gpus(cluster_nodes())


def with_gpus(nodes: Sequence[GpuNode]) -> list[GpuNode]:
    """Those of the nodes that have GPUs; if none has any, all of them."""
    return [node for node in nodes if node.gpus] or [*nodes]


def cluster_nodes() -> list[GpuNode]:
    """The cluster's living nodes, without those that drain."""
    draining = draining_nodes()
    free = ray._private.state.available_resources_per_node()
    return [
        GpuNode(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            int(node["Resources"].get("GPU", 0)),
            int(free.get(node["NodeID"], {}).get("GPU", 0)),
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("memory", 0)),
            frozenset(node["Resources"]).union(
                f"{name}={value}" for name, value in node.get("Labels", {}).items()
            ),
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    ]


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
