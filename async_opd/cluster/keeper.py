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

from async_opd.cluster.host import Remote
from async_opd.core.alarm import Alarm
from async_opd.core.config import SupervisionConfig
from async_opd.core.errors import ProcessDied, StageError, StageTimeout
from async_opd.core.supervision import Restarts


async def _nothing() -> None:
    """There is nothing to see to."""


@dataclass
class Keeper:
    """One process. ``rebuild`` builds its object again and sees to what it held.

    ``step()`` is the last one trained; see ``Restarts``.
    """

    remote: Remote
    rebuild: Callable[[], Awaitable[None]]
    supervision: SupervisionConfig
    tell: Callable[[str], None]
    step: Callable[[], int]
    restarts: Restarts = field(init=False)

    def __post_init__(self) -> None:
        """No restart yet."""
        self.restarts = Restarts(self.supervision)
        self._alarm = Alarm(self.remote.name)

    async def run(self, afterwards: Callable[[], Coroutine[Any, Any, None]] = _nothing) -> None:
        """Until cancelled, or until it was restarted too often: then its error.

        ``afterwards`` runs beside it after every restart.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                error = await self.death()
                self.tell(f"{self.remote.name} failed: {error}")
                while not await self._rebuilt(error):
                    pass
                self.tell(f"{self.remote.name} is restarted")
                group.create_task(afterwards())

    async def death(self) -> StageError:
        """Waits for the end of the process: a call breaks off, or it has another id, or none.

        One without an object has died before this was called, and its successor runs already.
        """
        bound = self.supervision.timeout_s
        try:
            pid = await self.remote.pid(bound)
            if not await self.remote.is_built(bound):
                return StageError(self.remote.name, "its process died")
        except StageError as error:
            return self._at_an_end(error)
        end = asyncio.create_task(self.remote.end())
        pulse = asyncio.create_task(self._pulse(pid))
        try:
            await asyncio.wait({end, pulse}, return_when=asyncio.FIRST_COMPLETED)
            return pulse.result() if pulse.done() else end.result()
        finally:
            end.cancel()
            pulse.cancel()

    async def _pulse(self, pid: int) -> StageError:
        while True:
            await self._alarm.pause(self.supervision.heartbeat_s)
            try:
                now = await self.remote.pid(self.supervision.timeout_s)
            except StageError as error:
                return self._at_an_end(error)
            if now != pid:
                return StageError(self.remote.name, "its process died")

    def _at_an_end(self, error: StageError) -> StageError:
        if isinstance(error, StageTimeout):
            self.remote.restart()
        return error

    async def _rebuilt(self, error: StageError) -> bool:
        delay = self.restarts.next_delay(self.step())
        if delay is None:
            self.remote.kill()
            raise error
        await self._alarm.pause(delay)
        try:
            await self.rebuild()
        except StageError as failed:
            self.tell(f"{self.remote.name} could not be restarted: {failed}")
            if not isinstance(failed.__cause__, ProcessDied):
                self.remote.restart()  # it may have an object, or still build one
            return False
        return True
