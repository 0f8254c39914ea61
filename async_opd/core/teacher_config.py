"""The ``teachers`` section: what a teacher is, and when one of its replicas counts as broken."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from async_opd.core.engine_config import EngineConfig
from async_opd.core.section import Section


class HealthConfig(Section):
    """When a teacher's replica counts as broken, and what is done about it."""

    timeout_s: float = Field(default=60, gt=0)
    """A call may take so long, plus the time of the tokens outstanding on its replica."""
    min_tokens_per_s: float = Field(default=200, gt=0)
    """The slowest speed at which a replica's outstanding tokens are waited for."""
    tries: int = Field(default=4, ge=2)
    """Calls with a rollout before it is dead-lettered: half of them with its whole batch, the
    others alone."""
    probes: PositiveInt = 5
    """A replica that failed has to score a rollout that was scored before. If it still answers
    but fails so many of these probes, it is rebuilt; a dead one is at once."""
    probe_s: float = Field(default=1, gt=0)
    """The first probe comes at once, the others after 1, 3, 7 … times this long."""
    rebuilds: int = Field(default=3, ge=0)
    """Rebuilds in a row without a scored batch in between; then the replica is given up."""


class TeacherConfig(Section):
    """One named teacher and its pool of replicas."""

    model: str = Field(min_length=1)
    """Directory of a Hugging Face model, or a hub id."""
    sources: list[str] | None = None
    """Values of ``data.route_by`` this teacher is responsible for; by default its own name."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of its samples in the distillation loss, beside those of other teachers: the loss is a
    weighted mean, so that only ratios between teachers matter."""
    replicas: int = Field(default=1, ge=1)
    """Independent engines of this teacher."""
    tensor_parallel: PositiveInt = 1
    """GPUs of each engine."""
    engine: EngineConfig = EngineConfig()
    """Settings of each engine."""
    health: HealthConfig = HealthConfig()
    max_dead_letter_share: float = Field(default=0.01, ge=0, le=1)
    """Share of this teacher's rollouts that may be dead-lettered before the run stops, with exit
    code 1. Counted of at least 1000: by default the first ten are always allowed."""
    trust_remote_code: bool = False
    """Runs code that comes with the model. Only for models you trust."""
