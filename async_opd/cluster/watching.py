"""Watches the cluster of a run from its driver, while stages are built, supervised or rewound.

every WATCH_S: nodes() ──► a node is lost, or has joined: one line
                     ├──► a process waits for GPUs: see ``placement.by_importance``
                     └──► no answer: one line at once; after HEAD_S HeadLost ends the run
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

import ray

from async_opd.cluster.placement.by_importance import Placement
from async_opd.cluster.placement.nodes import ANSWER_S, Node, nodes
from async_opd.core.errors import HeadLost, StageError
from async_opd.waiting.deadline import Deadline, Timer

WATCH_S = 2.0
"""Seconds between two questions, which take the head a millisecond."""
HEAD_S = 20.0
"""Seconds without an answer after which the run ends."""
RECONNECT, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
"""Ray's variable of the seconds after which it ends a process whose head is lost, and its default.
"""
NOTICED_S = 40.0
"""Longest time from the head's loss to HeadLost, and what the end of a run takes besides."""
REMEDY = (
    "start the cluster again, and --resume the run; docs/cluster.md says how a head can outlive "
    "its process"
)


def left_s() -> float:
    """Seconds for the last checkpoint after HeadLost, before Ray ends this process; perhaps 0."""
    return max(float(os.environ.get(RECONNECT, RECONNECT_S)) - NOTICED_S, 0)


class ClusterWatch:
    """``notify`` gets the lines."""

    def __init__(
        self,
        notify: Callable[[str], None],
        placement: Placement | None = None,
        ask: Callable[[], Awaitable[Mapping[str, Node]]] = nodes,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notify = notify
        self._placement = placement
        self._ask = ask
        self._deadline = Deadline("cluster", timer)
        self._clock = clock
        self._alive: Mapping[str, Node] | None = None
        self._draining: frozenset[str] = frozenset()
        self._changed = False
        self._silent_since: float | None = None

    async def run(self) -> NoReturn:
        """Until cancelled. Raises HeadLost when the head has not answered for ``HEAD_S``."""
        try:
            while True:
                await self.look()
                await self._deadline.pause(WATCH_S)
        finally:
            if self._placement is not None:
                self._placement.close()

    async def look(self) -> None:
        """Asks the head once, and the units that wait for GPUs; see ``run``."""
        asked = self._clock()
        try:
            self._changed |= self._noticed(await self._ask())
            if self._placement is not None:  # it asks the head too, where Ray has no bound
                look = self._placement.look(self._changed)
                await self._deadline.within(2 * ANSWER_S, "the head's answer about GPUs", look)
            self._changed = False
        except (StageError, ray.exceptions.RayError) as error:
            self._head_is_silent(asked, error)
            return
        if self._silent_since is not None:
            self._notify("cluster: Ray's head answers again")
            self._silent_since = None

    def _noticed(self, found: Mapping[str, Node]) -> bool:
        """Whether nodes were lost, have joined or drain since the last look; says which.

        Those that drain make room later, when their processes have left.
        """
        alive = {key: node for key, node in found.items() if node.alive}
        before, self._alive = self._alive or alive, alive
        for key in before.keys() - alive.keys():
            self._notify(f"cluster: {found.get(key, before[key]).loss}")
        for key in alive.keys() - before.keys():
            self._notify(f"cluster: {alive[key].name} has joined")
        draining = frozenset(key for key, node in alive.items() if node.draining)
        for key in draining - self._draining:
            leave = "its replicas leave it; those that share GPUs stay until it is lost"
            self._notify(f"cluster: {alive[key].name} drains: {leave}")
        self._draining = draining
        return bool(draining) or before.keys() != alive.keys()

    def _head_is_silent(self, asked: float, error: Exception) -> None:
        words = error.cause if isinstance(error, StageError) else " ".join(str(error).split())
        if self._silent_since is None:
            self._silent_since = asked
            self._notify(f"cluster: {words}; unless it answers, the run ends after {HEAD_S:g} s")
        silent_s = self._clock() - self._silent_since
        if silent_s >= HEAD_S:
            cause = f"Ray's head has not answered for {silent_s:.0f} s: {words}"
            raise HeadLost("cluster", cause, REMEDY) from error
