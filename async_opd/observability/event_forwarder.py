"""Writes the events of stages to the run's log, also while no step ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from async_opd.core.errors import AsyncOPDError
from async_opd.core.stages import Log, Queue, Rollouter, TeacherScorer
from async_opd.waiting.waits import WAITING

LAST_EVENTS_S = 5.0
"""Seconds that a failing run waits for the last events of a stage that may have died."""
Stage = Queue | Rollouter | TeacherScorer
"""A stage that has events."""


@dataclass(eq=False)
class EventForwarder:
    """Asks each stage for the events after those it has seen."""

    log: Log
    _seen: Counter[int] = field(default_factory=Counter, init=False)  # by id() of the stage

    async def forward(self, stage: Stage) -> None:
        """Writes the stage's events as they come, until cancelled."""
        while True:
            await self._forward_once(stage)

    async def forward_last(self, *stages: Stage) -> None:
        """Writes the events before the error that ends the run, which may explain it."""
        for stage in stages:
            with suppress(AsyncOPDError, TimeoutError):
                async with asyncio.timeout(LAST_EVENTS_S):
                    while await self._forward_once(stage, wait=False):
                        pass

    async def _forward_once(self, stage: Stage, wait: bool = True) -> bool:
        """Forwards the next events; whether there were any."""
        events = await stage.events(self._seen[id(stage)], wait)
        self._seen[id(stage)] = events.seen
        for line in events.lines:
            self.log.message(line, "info" if line.startswith(WAITING) else "warning")
        return bool(events.lines)
