"""Keeps the process of a single stage alive.

    up ── its process dies, or gives no sign of life ──► down ── a delay ──► rebuilt ──► up
                                                          │ too often
                                                          └──► gone: its error ends the run

Ray starts the process again at once, so that every handle to it stays valid; its object is built
anew by the keeper, later each time, and calls wait for that. What a call had reached when the
process died is repeated by the proxies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from async_opd.cluster.actor_shell import Remote
from async_opd.config.run_config import SupervisionConfig
from async_opd.core.deadline import Deadline
from async_opd.core.errors import ProcessDied, StageError, StageTimeout
from async_opd.processes.restarts import Restarts


async def _noop() -> None:
    """There is nothing to see to."""


@dataclass
class Supervisor:
    """One process. ``rebuild`` builds its object again and sees to what it held.

    ``step()`` is the last one trained; see ``Restarts``.
    """

    remote: Remote
    rebuild: Callable[[], Awaitable[None]]
    supervision: SupervisionConfig
    notify: Callable[[str], None]
    step: Callable[[], int]
    restarts: Restarts = field(init=False)

    def __post_init__(self) -> None:
        """No restart yet."""
        self.restarts = Restarts(self.supervision)
        self._deadline = Deadline(self.remote.name)

    async def run(self, afterwards: Callable[[], Coroutine[Any, Any, None]] = _noop) -> None:
        """Until cancelled, or until it was restarted too often: then its error.

        ``afterwards`` runs beside it after every restart.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                error = await self.wait_for_death()
                self.notify(f"{self.remote.name} failed: {error}")
                while not await self._rebuild_after_delay(error):
                    pass
                self.notify(f"{self.remote.name} is restarted")
                group.create_task(afterwards())

    async def wait_for_death(self) -> StageError:
        """Waits for the end of the process: a call breaks off, or it has another id, or none.

        One without an object has died before this was called, and its successor runs already.
        """
        bound = self.supervision.timeout_s
        try:
            pid = await self.remote.pid(bound)
            if not await self.remote.is_built(bound):
                return StageError(self.remote.name, "its process died")
        except StageError as error:
            return self._restart_if_hung(error)
        end = asyncio.create_task(self.remote.end())
        pulse = asyncio.create_task(self._heartbeat(pid))
        try:
            await asyncio.wait({end, pulse}, return_when=asyncio.FIRST_COMPLETED)
            return pulse.result() if pulse.done() else end.result()
        finally:
            end.cancel()
            pulse.cancel()

    async def _heartbeat(self, pid: int) -> StageError:
        while True:
            await self._deadline.pause(self.supervision.heartbeat_s)
            try:
                now = await self.remote.pid(self.supervision.timeout_s)
            except StageError as error:
                return self._restart_if_hung(error)
            if now != pid:
                return StageError(self.remote.name, "its process died")

    def _restart_if_hung(self, error: StageError) -> StageError:
        if isinstance(error, StageTimeout):
            self.remote.restart()
        return error

    async def _rebuild_after_delay(self, error: StageError) -> bool:
        delay = self.restarts.next_delay(self.step())
        if delay is None:
            self.remote.kill()
            raise error
        await self._deadline.pause(delay)
        try:
            await self.rebuild()
        except StageError as failed:
            self.notify(f"{self.remote.name} could not be restarted: {failed}")
            if not isinstance(failed.__cause__, ProcessDied):
                self.remote.restart()  # it may have an object, or still build one
            return False
        return True
