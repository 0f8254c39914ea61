"""The ``plan`` section: speeds of the parts of a run. Only ``async_opd plan`` reads it.

``async_opd plan RUN_DIR`` prints the section with the measured speeds of a finished run.
"""

from __future__ import annotations

from pydantic import Field

from async_opd.config.sections.section import Name, Section


class RolloutPlan(Section):
    """One replica of the student: an engine step gives each running request one token."""

    step_s: float = Field(ge=0)
    """Seconds of an engine step without any request."""
    step_s_per_request: float = Field(default=0.0, ge=0)
    """Further seconds of an engine step for each running request."""
    turnaround_s: float = Field(default=0.0, ge=0)
    """Seconds from the moment a replica has room for more requests until they arrive."""

    def step(self, running: int) -> float:
        """Seconds of one engine step with so many running requests."""
        return self.step_s + running * self.step_s_per_request


class TeacherPlan(Section):
    """One replica of a teacher: a batch takes ``overhead_s`` and its tokens."""

    tokens_per_s: float = Field(gt=0)
    """Prompt and response tokens per second while the replica scores."""
    overhead_s: float = Field(default=0.0, ge=0)
    """Seconds of a batch besides its tokens."""
    turnaround_s: float = Field(default=0.0, ge=0)
    """Seconds from a scored batch until its slot gets the next one; a replica has two slots."""
    share: float | None = Field(default=None, gt=0, le=1)
    """This teacher's share of the prompts; by default an equal part of the rest."""

    def seconds(self, tokens: float) -> float:
        """Seconds of one batch with so many prompt and response tokens."""
        return self.overhead_s + tokens / self.tokens_per_s


class TrainPlan(Section):
    """The trainer on one rank: a step takes ``overhead_s`` and its tokens."""

    tokens_per_s: float = Field(gt=0)
    """Prompt and response tokens per second while the trainer computes."""
    overhead_s: float = Field(default=0.0, ge=0)
    """Seconds of a step besides its tokens."""
    turnaround_s: float = Field(default=0.0, ge=0)
    """Seconds between two steps although the next batch is there."""
    snapshot_s: float = Field(default=0.0, ge=0)
    """Seconds in which the trainer copies its weights for a sync, once a weight version."""
    sync_s: float = Field(default=0.0, ge=0)
    """Seconds for which a weight sync pauses each rollout replica."""
    scaling: float = Field(default=0.9, gt=0, le=1)
    """Assumption about further ranks: r ranks have 1 + scaling · (r - 1) times the tokens per
    second of one."""

    def seconds(self, tokens: float, ranks: int = 1) -> float:
        """Seconds of one step of ``ranks`` ranks with so many prompt and response tokens."""
        speedup = 1 + self.scaling * (ranks - 1)
        return self.overhead_s + tokens / (self.tokens_per_s * speedup)


class PlanConfig(Section):
    """Speeds of the hardware and lengths of responses, for ``async_opd plan``."""

    prompt_tokens: float = Field(gt=0)
    """Mean length of a prompt."""
    response_tokens: float = Field(gt=0)
    """Mean length of a response if ``rollout.max_tokens`` did not cut it off."""
    response_sigma: float = Field(default=1.0, ge=0)
    """Spread of the lengths: standard deviation of their natural logarithm (log-normal)."""
    rollout: RolloutPlan
    teachers: dict[Name, TeacherPlan]
    """Speeds by name of the teacher."""
    train: TrainPlan
    evaluation_s: float = Field(default=0.0, ge=0)
    """Seconds for which the rollout replicas answer an evaluation beside their rollouts."""
    outside_s: float = Field(default=0.0, ge=0)
    """Seconds of a run before its first and after its last step: start, first and last evaluation,
    saving, shutdown."""
