"""The lag of an event loop: how late a timer fires."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.05


class LoopLag:
    """Measures the lag of the running loop by timers, one every ``interval_s``."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._worst_s = 0.0
        self._set()

    def drain(self) -> float:
        """The longest lag since the last call, in seconds; too short by up to the interval."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return max(worst_s, self._loop.time() - self._due)

    def stop(self) -> None:
        """Sets no more timers."""
        self._timer.cancel()

    def _set(self) -> None:
        self._due = self._loop.time() + self._interval_s
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._worst_s = max(self._worst_s, self._loop.time() - self._due)
        self._set()
