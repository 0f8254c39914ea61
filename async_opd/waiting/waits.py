"""Lines of ``run.log`` about everything that a process waits for: one every 10 s for all of it.

with waits.on("student/0", 600.0): …  ──┐
with waits.on("trainer", 600.0): …    ──┴── every EVERY_S ──► waiting for student/0 (20 s so …
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from async_opd.waiting.deadline import Deadline, Timer

EVERY_S = 10.0
"""Seconds between two lines."""
LONG_S = 1.0
"""Seconds of a wait after which a line may name it; also those between two that follow each other:
the 10 s begin with the first of these."""
MAX_NAMED = 8
"""Waits that a line names, the oldest ones; it counts the others."""
WAITING = "waiting for "
"""The beginning of every line: a view shows the newest one only."""


def named(what: str, so_far_s: float, bound_s: float, each: str = "") -> str:
    """The words for one wait: its name, its time so far, its bound; ``inf`` means without one."""
    bound = "no bound" if bound_s == math.inf else f"at most {bound_s:g} s{each}"
    return f"{what} ({so_far_s:.0f} s so far, {bound})"


@dataclass(eq=False)
class _Wait:
    what: str
    bound_s: float
    each: str
    since: float


class Waits:
    """The waits of one process that are not over. ``notify`` gets the lines."""

    def __init__(
        self,
        notify: Callable[[str], None],
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notify = notify
        self._deadline = Deadline("waits", timer)
        self._clock = clock
        self._open: list[_Wait] = []
        self._logging: asyncio.Task[None] | None = None
        self._since = 0.0  # the last line, or the begin of the first wait after it
        self._ended = -math.inf  # the last long wait

    @contextmanager
    def on(self, what: str, bound_s: float = math.inf, each: str = "") -> Iterator[None]:
        """The block waits for ``what``, at most ``bound_s`` seconds; ``inf`` means without a bound.

        ``each`` follows the seconds: `` a try``, for example. This only says so; the block ends it.
        """
        wait = _Wait(what, bound_s, each, self._clock())
        self._open.append(wait)
        if self._logging is None:
            if wait.since - self._ended > LONG_S:
                self._since = wait.since
            self._logging = asyncio.create_task(self._log_waits(), name="waits")
        try:
            yield
        finally:
            self._open.remove(wait)
            if (now := self._clock()) - wait.since >= LONG_S:
                self._ended = now
            if not self._open:
                self._logging.cancel()
                self._logging = None

    async def _log_waits(self) -> None:
        while True:
            await self._deadline.pause(max(self._since + EVERY_S - self._clock(), LONG_S))
            self._since = now = self._clock()
            oldest = self._open[:MAX_NAMED]
            words = [named(one.what, now - one.since, one.bound_s, one.each) for one in oldest]
            if len(self._open) > len(oldest):
                words.append(f"{len(self._open) - len(oldest)} others")
            self._notify(WAITING + "; ".join(words))
