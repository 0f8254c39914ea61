"""A real Ray cluster on this machine, started again where a raylet was too slow for its agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import ray
from ray.cluster_utils import Cluster

from async_opd.cluster.session import TOO_SLOW

Started = TypeVar("Started")

STARTS = 5


class PatientCluster(Cluster):  # type: ignore[misc]
    """Starts a node again where Ray's processes were too slow for each other."""

    def add_node(self, wait: bool = True, **node: Any) -> Any:
        """See Cluster."""
        before = {self.head_node, *self.worker_nodes}

        def undo() -> None:  # one that was only late would be one more
            for late in {self.head_node, *self.worker_nodes} - before - {None}:
                self.remove_node(late, allow_graceful=False)

        return started(partial(super().add_node, wait, **node), undo)


@contextmanager
def ray_cluster(*nodes: dict[str, Any], joined: bool = True) -> Iterator[PatientCluster]:
    """A cluster of these nodes, the head first, which this process has ``joined``."""
    cluster = PatientCluster()
    try:
        for node in nodes:
            cluster.add_node(**node)
        if joined:
            ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def started(start: Callable[[], Started], undo: Callable[[], object] = ray.shutdown) -> Started:
    """What ``start`` returns; called again while it is too slow, as ``ray_session`` does."""
    for _ in range(STARTS - 1):
        try:
            return start()
        except Exception as error:
            if TOO_SLOW not in str(error) and not isinstance(error, TimeoutError):
                raise
            undo()
    return start()
