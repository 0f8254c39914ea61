"""The ``checkpoint``, ``shutdown`` and ``timeouts`` sections: how a run ends, and goes on."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from async_opd.config.section import Section


class CheckpointConfig(Section):
    """What ``--resume`` goes on from. See docs/reliability.md."""

    every: int = Field(default=10, ge=0)
    """Weight versions between two checkpoints; 0: only where a run ends or is interrupted. One is
    written while training goes on, and left out while the one before is still being written."""
    keep: PositiveInt = 2
    """The newest so many are kept."""
    on_exit: bool = True
    """Also when a signal or an error ends the run, as far as the trainer still answers."""
    timeout_s: float = Field(default=1800, gt=0)
    """Bound of writing one, also when an error ends the run (after a signal: ``shutdown.grace_s``).
    A checkpoint that fails is counted and reported; the run goes on."""


class ShutdownConfig(Section):
    """How a run ends on SIGINT and SIGTERM: exit code 130, after a checkpoint and the model."""

    grace_s: float = Field(default=60, gt=0)
    """From the signal to the exit. What is not written then is given up; a second SIGINT ends the
    run at once. Below what the platform grants before it kills."""


class TimeoutConfig(Section):
    """Bounds of every wait that is not for work, in seconds."""

    engine_start_s: float = Field(default=600, gt=0)
    """Until all engines and the trainer are ready."""
    stall_s: float = Field(default=1800, gt=0)
    """Without any token that is generated, scored or trained on, the run is stopped as stalled.
    Tokens beyond those that a step can need at most (of ``rollout.max_tokens`` each) do not
    count."""
    request_s: float = Field(default=600, gt=0)
    """One call to a replica or stage. A host of colocated teachers that is to rest finishes its
    responses first, or its step, however long they are: this is the longest time without a token
    then."""
    collective_s: float = Field(default=600, gt=0)
    """One collective of the trainer's ranks: how long one may wait for the others."""
    shutdown_s: float = Field(default=30, gt=0)
    """Clean shutdown; what still lives then is killed."""
