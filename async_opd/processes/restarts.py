"""When a failed member is rebuilt: later each time, and only so often."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from async_opd.config.sections.reliability import SupervisionConfig


class Restarts:
    """The restarts of one replica or stage: at most ``max_restarts`` that are not forgotten.

    A restart is forgotten when it is longer ago than ``window_s``, and something newer has been
    reached than before it. So what dies again and again at the same place comes to an end, however
    long it takes to get there.
    """

    def __init__(
        self, config: SupervisionConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._remembered: list[tuple[float, float]] = []  # when, and what had been reached
        self._newest = -math.inf

    def next_delay(self, reached: float) -> float | None:
        """Counts a restart: the seconds to wait before it, or None if there were too many.

        0, 1, 3, 7 … times ``delay_s``: at once, then later and later. ``reached`` grows with what
        is done, a step for example; a smaller one than before (after a rewind) is nothing new.
        """
        now, self._newest = self._clock(), max(self._newest, reached)
        self._remembered = [
            (when, then)
            for when, then in self._remembered
            if now - when <= self._config.window_s or then >= self._newest
        ]
        before = len(self._remembered)
        if before >= self._config.max_restarts:
            return None
        self._remembered.append((now, self._newest))
        return self._config.delay_s * (2.0**before - 1)
