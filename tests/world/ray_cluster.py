"""A real Ray cluster on this machine, started again where a raylet was too slow for its agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from async_opd.cluster.session import TOO_SLOW

STARTS = 5


@contextmanager
def ray_cluster(*nodes: dict[str, Any], joined: bool = True) -> Iterator[Cluster]:
    """A cluster of these nodes, the head first, which this process has ``joined``."""
    clusters: list[Cluster] = []

    def start() -> None:
        clusters.append(Cluster())
        for node in nodes:
            clusters[-1].add_node(**node)
        if joined:
            ray.init(address=clusters[-1].address, log_to_driver=False)

    try:
        started(start)
        yield clusters[-1]
    finally:
        ray.shutdown()
        for cluster in clusters:
            cluster.shutdown()


def started(start: Callable[[], object]) -> None:
    """Calls ``start`` again while it is too slow, as ``ray_session`` does."""
    for _ in range(STARTS - 1):
        try:
            start()
            return
        except Exception as error:
            if TOO_SLOW not in str(error):
                raise
            ray.shutdown()
    start()
