"""When something that failed is started again, later each time, and when no more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from async_opd.core.supervision_config import SupervisionConfig


class Restarts:
    """The restarts of one replica or stage: at most ``tries`` within any ``window_s``."""

    def __init__(
        self, config: SupervisionConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = 0
        self._config = config
        self._clock = clock
        self._recent: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Counts a restart: the seconds to wait before it, or None if there were too many.

        0, 1, 3, 7 … times ``delay_s``: at once, then later and later.
        """
        now = self._clock()
        while self._recent and now - self._recent[0] > self._config.window_s:
            self._recent.popleft()
        before = len(self._recent)
        if before >= self._config.tries:
            return None
        self._recent.append(now)
        self.total += 1
        return self._config.delay_s * (2.0**before - 1)
