"""The ``supervision`` section: restarts of what dies or hangs."""

from __future__ import annotations

from pydantic import Field

from async_opd.core.section import Section


class SupervisionConfig(Section):
    """What becomes of processes that die or hang. See docs/reliability.md."""

    tries: int = Field(default=5, ge=0)
    """Most restarts of one replica or stage within ``window_s``; the next failure is final."""
    window_s: float = Field(default=600, gt=0)
    """Restarts longer ago than this are forgotten."""
    delay_s: float = Field(default=1, gt=0)
    """Seconds before a restart: none before the first within the window, this before the second,
    then 3, 7, 15 … times as many."""
    heartbeat_s: float = Field(default=10, gt=0)
    """Seconds between two signs of life that a replica or stage is asked for."""
    timeout_s: float = Field(default=60, gt=0)
    """One that does not answer within this time is taken for dead, ended and restarted."""
