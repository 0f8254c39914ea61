"""Watches the cluster of a run from its driver, as long as stages are supervised or built.

every WATCH_S: nodes() ──► a node is lost, or has joined: one line
                     ├──► a process waits for GPUs: see ``placement``
                     └──► no answer: one line at once; after HEAD_S HeadLost ends the run
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from async_opd.cluster.watching.nodes import Node, nodes
from async_opd.cluster.watching.placement import Placement
from async_opd.core.errors import HeadLost, StageError
from async_opd.waiting.deadline import Deadline, Timer

WATCH_S = 2.0
"""Seconds between two questions, which take the head a millisecond."""
HEAD_S = 20.0
"""Seconds without an answer after which the run ends. Ray itself ends every process of the run
after 60 s: the others are for the last checkpoint."""
REMEDY = (
    "start the cluster again, and --resume the run; docs/cluster.md says how a head can outlive "
    "its process"
)


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
        """Asks the head once; see ``run``."""
        asked = self._clock()
        try:
            found = await self._ask()
        except StageError as error:
            self._head_is_silent(asked, error)
            return
        if self._silent_since is not None:
            self._notify("cluster: Ray's head answers again")
            self._silent_since = None
        alive = {key: node for key, node in found.items() if node.alive}
        before, self._alive = self._alive or alive, alive
        for key in before.keys() - alive.keys():
            self._notify(f"cluster: {found.get(key, before[key]).loss}")
        for key in alive.keys() - before.keys():
            self._notify(f"cluster: {alive[key].name} has joined")
        if self._placement is not None:
            await self._placement.look(changed=before.keys() != alive.keys())

    def _head_is_silent(self, asked: float, error: StageError) -> None:
        if self._silent_since is None:
            self._silent_since = asked
            self._notify(f"{error}; unless it answers, the run ends after {HEAD_S:g} s")
        silent_s = self._clock() - self._silent_since
        if silent_s >= HEAD_S:
            cause = f"Ray's head has not answered for {silent_s:.0f} s: {error.cause}"
            raise HeadLost("cluster", cause, REMEDY) from error
