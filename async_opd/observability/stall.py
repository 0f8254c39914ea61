"""A run that stands still ends: no token was computed anywhere for ``timeouts.stall_s``."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from async_opd.config.run_config import RunConfig
from async_opd.core.deadline import Timer
from async_opd.core.errors import StageTimeout
from async_opd.core.liveness import CombinedProgress, Progress, ProgressWatchdog, answer_s
from async_opd.grading.evaluation import Evaluation
from async_opd.observability.metering import Metering

Result = TypeVar("Result")

PIPELINE = "pipeline"
STAGES = 3
"""Each token of a sample is computed by the student, a teacher and the trainer."""
LONGEST_PROMPT = 32_768
"""Tokens of a prompt, where the config bounds them by nothing else."""


class ReportsProgress(Protocol):
    """A stage that computes tokens."""

    async def progress(self) -> Progress: ...


class ComputingStages(Protocol):
    """Those that do."""

    @property
    def rollouter(self) -> ReportsProgress: ...
    @property
    def scorer(self) -> ReportsProgress: ...
    @property
    def trainer(self) -> ReportsProgress: ...


class StallDetector:
    """Waits for what lasts as long as the stages' work. ``evaluated`` prompts are asked at once."""

    def __init__(
        self,
        config: RunConfig,
        stages: ComputingStages,
        metering: Metering,
        evaluated: int = 0,
        timer: Timer | None = None,
    ) -> None:
        self._bound_s = config.timeouts.stall_s
        self._metering = metering
        self._timer = timer
        self._most = most_tokens(config, evaluated)
        self._asked = CombinedProgress(
            {
                "rollouter": lambda: stages.rollouter.progress(),
                "scorer": lambda: stages.scorer.progress(),
                "trainer": lambda: stages.trainer.progress(),
            },
            answer_s(self._bound_s),
            timer,
        )

    async def within(self, what: str, work: Awaitable[Result], least_s: float = 0.0) -> Result:
        """The work's result. StageTimeout when nothing was computed for ``timeouts.stall_s``.

        ``least_s``: for so long nothing needs to be heard of.
        """
        quiet_s = max(self._bound_s, least_s)
        watchdog = ProgressWatchdog(PIPELINE, quiet_s, "timeouts.stall_s", self._timer)
        try:
            return await watchdog.within(f"waited for {what}", work, self._asked, self._most)
        except StageTimeout as error:
            if error.stage != PIPELINE:
                raise
            waits = "; ".join(f"{pool}: {why}" for pool, why in self._metering.waits.items())
            cause = f"{error.cause}; what the pools waited for last: {waits or '?'}"
            raise StageTimeout(PIPELINE, cause, error.remedy) from error


def most_tokens(config: RunConfig, evaluated: int) -> int:
    """Tokens that all stages compute, at most, until a step ends, or an evaluation.

    Those of the samples that may be under way, (1 + s) K B, or of the evaluation's prompts.
    """
    run = config.async_
    samples = (1 + run.staleness_threshold) * run.sync_steps * config.train.batch_size
    prompt = config.data.max_prompt_tokens or LONGEST_PROMPT
    longest = max(config.rollout.max_tokens, config.eval.max_tokens or 0)
    length = config.rollout.engine.max_model_len or prompt + longest
    return int(max(samples, evaluated)) * length * STAGES


def teachers_s(config: RunConfig, evaluation: Evaluation) -> float:
    """Seconds that teachers may take for their own answers; only whole ones are heard of."""
    longest_s = 0.0
    for name, teacher in config.teachers.items():
        health, sampling = teacher.health, evaluation.sampling
        prompts = [prompt for prompt in evaluation.prompts if prompt.teacher == name]
        tokens = sum(len(p.token_ids) + sampling.n * sampling.max_tokens for p in prompts)
        together_s = health.timeout_s + tokens / health.min_tokens_per_s
        each_s = max(together_s, health.response_s(sampling.max_tokens))
        longest_s = max(longest_s, health.tries * each_s)
    return longest_s
