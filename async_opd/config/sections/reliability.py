"""A run's reactions to failures, and to weights that become worse: five sections.

``checkpoint``, ``guardrail``, ``shutdown``, ``timeouts`` and ``supervision``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from async_opd.config.paths import is_url
from async_opd.config.sections.section import Count, Name, Section, steps_or_versions


class CheckpointConfig(Section):
    """Checkpoints, from which ``--resume`` continues a run. See docs/reliability.md."""

    every: int | None = Field(default=10, ge=0)
    """Weight versions between two checkpoints; 0: only when a run ends or is interrupted. Training
    goes on while a checkpoint is written; one that is due before it is written is skipped."""
    every_steps: Count | None = None
    """Training steps between two checkpoints, instead of ``every``."""
    keep: Count = 2
    """Number of the newest checkpoints that are kept; a run that may roll back keeps two more."""
    keep_best: Name | None = Field(default=None, pattern=r"^eval/.+/accuracy$")
    """Accuracy by which the best checkpoint is kept too: ``eval/gsm8k/accuracy``, or
    ``eval/*/accuracy``, the mean over data sources. Evaluated versions then have checkpoints, and a
    completed run has the best student in ``best/``. By default only the newest are kept."""
    on_exit: bool = True
    """Takes a checkpoint also when a signal or an error ends the run, if the trainer answers."""
    timeout_s: float = Field(default=600, gt=0)
    """Timeout of writing a checkpoint, of reading one, and of writing the trained model, to which
    the time of the trainer's bytes is added; also when an error ends the run (after a signal:
    ``shutdown.grace_s``). A checkpoint that fails is counted and reported; the run goes on."""
    min_mib_per_s: float = Field(default=64, gt=0)
    """Lowest assumed speed of the run directory's disk, which gives the time of the trainer's
    bytes: 12 of each parameter of the student."""

    mirror: str | None = Field(default=None, min_length=1)
    """URL (``s3://bucket/runs/a``) of this run alone, to which its checkpoints and results are
    copied beside training, and from which ``--resume`` takes them on another machine. A run that
    completes waits for its copies as long as for a checkpoint, and fails without them. See
    docs/storage.md."""

    @model_validator(mode="before")
    @classmethod
    def _one_period(cls, given: Any) -> Any:
        return steps_or_versions(given)

    @field_validator("mirror")
    @classmethod
    def _is_a_url(cls, mirror: str | None) -> str | None:
        if mirror is not None and not is_url(mirror):
            raise ValueError("a URL, as in s3://bucket/runs/a or file:///mnt/runs/a")
        return mirror

    def bound_s(self, nbytes: int) -> float:
        """Timeout in seconds of a call that writes or reads ``nbytes``."""
        return self.timeout_s + nbytes / (self.min_mib_per_s * (1 << 20))


class GuardrailConfig(Section):
    """Limits for responses, and for engines' precision, while training. See docs/staleness.md."""

    mode: Literal["warn", "stop", "roll_back", "off"] = "warn"
    """An exceeded limit gives a message (``warn``), ends the run with exit code 1 (``stop``), or
    takes the run back to the newest checkpoint from at least ``window`` steps before, or the
    oldest that is left (``roll_back``)."""
    max_roll_backs: Count = 2
    """Maximum of rollbacks of a run; the next exceeded limit ends it with exit code 1."""
    roll_back_lr: float = Field(default=0.5, gt=0, le=1)
    """Factor of the learning rate at each rollback, which lasts until the run ends: with the same
    rate the run would probably take the same way again."""
    max_truncated_share: float = Field(default=0.5, gt=0, le=1)
    """Limit of the share of responses that are cut off at ``rollout.max_tokens``."""
    max_length_drift: float = Field(default=3.0, gt=1)
    """Limit of the mean response length, as a multiple of that of the first ``window`` steps."""
    max_repetition: float = Field(default=0.5, gt=0, le=1)
    """Limit of the mean share of a response's 8-grams that occurred in it before."""
    max_mismatch: float = Field(default=1.05, gt=1)
    """Limit of ``mismatch/error``, the mean factor between the probabilities of engines and trainer
    under the same weights, over the steps that measure it."""
    min_ess: float = Field(default=0.5, ge=0, lt=1)
    """Least ``mismatch/ess``, the share of responses that this difference leaves effective, of
    engines that are quantized (``rollout.engine.quantization``, ``sync.fake_quantization``): long
    responses lower it at any precision. 0 switches the limit off."""
    window: Count = 10
    """Steps over which the values are smoothed (exponential mean), and steps at the start that
    define the baseline of the length."""


class ShutdownConfig(Section):
    """The end of a run on SIGINT and SIGTERM: exit code 130, after a checkpoint and the model."""

    grace_s: float = Field(default=60, gt=0)
    """Seconds from the signal to the exit, less than the platform grants. Unwritten files are
    abandoned then; a second SIGINT ends the run at once."""


class TimeoutConfig(Section):
    """Bounds of all waits for anything but work, in seconds."""

    engine_start_s: float = Field(default=600, gt=0)
    """Start of all engines and the trainer, including vLLM's own wait for an engine's processes."""
    stall_s: float = Field(default=1800, gt=0)
    """Time without a generated, scored or trained token, after which the run is stopped as stalled.
    Tokens beyond the most that a step can need (of ``rollout.max_tokens`` each) do not count.
    Also the time for which a source of prompts may give no row while the next ones are read."""
    request_s: float = Field(default=600, gt=0)
    """One call to a replica or stage. Before a GPU host goes to sleep it finishes its responses, or
    its step, for any time: this then bounds the time without a token. vLLM waits as long for one
    step of a tensor-parallel engine, and at least 300 s."""
    collective_s: float = Field(default=600, gt=0)
    """One collective of the trainer's ranks: the longest wait of one rank for the others."""
    shutdown_s: float = Field(default=30, gt=0)
    """Clean shutdown, after which remaining processes are killed."""


HEARTBEATS = 6
"""Heartbeats within ``supervision.timeout_s``."""


class SupervisionConfig(Section):
    """Restarts of replicas, stages and ranks that die or hang. See docs/reliability.md."""

    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one replica or stage that are not forgotten; the next failure is final."""
    window_s: float = Field(default=600, gt=0)
    """A restart longer ago than this is forgotten once the run has made progress since: for the
    trainer, the queue, the rollout and the scoring stage a step that had not been trained before,
    for a student's replica a step during which it finished rollouts, for a teacher's a successful
    call."""
    delay_s: float = Field(default=1, gt=0)
    """Seconds before a restart: 0 before the first that is not forgotten, this before the second,
    then 3, 7, 15 … times as many. Probes of a teacher's replica that failed come after the same
    times, at most 30 s apart."""
    timeout_s: float = Field(default=60, gt=0)
    """A student's replica, the queue, the rollout stage, the scoring stage or a rank whose
    heartbeat has no answer within this time counts as dead, is ended and restarted. Heartbeats come
    six times in it. A teacher's replica has none: its calls and reports show failures."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self.timeout_s / HEARTBEATS
