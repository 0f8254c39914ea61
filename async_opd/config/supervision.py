"""The ``supervision`` section: restarts of everything that can die."""

from __future__ import annotations

from pydantic import Field

from async_opd.config.section import Section


class SupervisionConfig(Section):
    """What becomes of replicas, stages and ranks that die or hang. See docs/reliability.md."""

    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one replica or stage that are not forgotten; the next failure is final."""
    window_s: float = Field(default=600, gt=0)
    """A restart longer ago than this is forgotten, once something newer has been reached than
    before it: for the trainer, the queue and the scoring stage a step that had not been trained
    yet, for a student's replica a step during which it finished rollouts, for a teacher's a call
    that succeeded."""
    delay_s: float = Field(default=1, gt=0)
    """Seconds before a restart: none before the first that is not forgotten, this before the
    second, then 3, 7, 15 … times as many. Probes of a teacher's replica that failed come after the
    same times, at most 30 s apart."""
    heartbeat_s: float = Field(default=10, gt=0)
    """Seconds between two signs of life that a student's replica, the queue, the scoring stage or a
    rank is asked for; a teacher's replica is found out by its calls and reports."""
    timeout_s: float = Field(default=60, gt=0)
    """One that does not answer within this time is taken for dead, ended and restarted."""
