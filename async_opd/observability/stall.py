"""Ends a run that makes no progress: no stage computed a token for ``timeouts.stall_s``."""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageTimeout
from async_opd.core.samples import Prompt
from async_opd.core.stages import SamplingSpec, Stages
from async_opd.observability.metering import Metering
from async_opd.waiting.deadline import Timer
from async_opd.waiting.liveness import CombinedProgress, ProgressWatchdog, answer_s
from async_opd.waiting.waits import Waits

Result = TypeVar("Result")

PIPELINE = "pipeline"
STAGES = 3
"""Each token of a sample is computed by the student, a teacher and the trainer."""
NO_TOKEN = " without a new token"
"""After the seconds of a bound: what it bounds."""
LONGEST_PROMPT = 32_768
"""Tokens of a prompt for which the config has no bound."""


class StallDetector:
    """Bounds waits by the stages' progress, and names them in ``waits``.

    ``evaluated`` is the prompts of one evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Stages,
        metering: Metering,
        waits: Waits,
        evaluated: int = 0,
        timer: Timer | None = None,
    ) -> None:
        self._waits = waits
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

    async def within(
        self, what: str, work: Awaitable[Result], least_s: float = 0.0, endless: bool = False
    ) -> Result:
        """The work's result. StageTimeout when no token was computed for ``timeouts.stall_s``.

        The bound is at least ``least_s``, the longest time without a progress report. ``endless``:
        other work goes on meanwhile, of any number of tokens, and nothing waits for this one. The
        error says what each pool waited for.
        """
        quiet_s = max(self._bound_s, least_s)
        watchdog = ProgressWatchdog(PIPELINE, quiet_s, "timeouts.stall_s", self._timer)
        most = sys.maxsize if endless else self._most
        waiting = nullcontext() if endless else self._waits.on(what, quiet_s, NO_TOKEN)
        try:
            with waiting:
                return await watchdog.within(f"waited for {what}", work, self._asked, most)
        except StageTimeout as error:
            if error.stage != PIPELINE:
                raise
            waits = "; ".join(f"{pool}: {why}" for pool, why in self._metering.waits.items())
            cause = f"{error.cause}; what the pools waited for last: {waits or '?'}"
            raise StageTimeout(PIPELINE, cause, error.remedy) from error


def most_tokens(config: RunConfig, evaluated: int) -> int:
    """An upper bound of the tokens that all stages compute until a step or evaluation ends.

    They are those of the (1 + s) K B samples in flight, or of the evaluation's prompts.
    """
    prompt = config.data.max_prompt_tokens or LONGEST_PROMPT
    longest = config.answer_tokens + config.context_tokens
    length = config.rollout.engine.max_model_len or prompt + longest
    turns = 1 if config.environment is None else config.environment.max_turns  # each a request
    return max(config.max_in_flight, evaluated) * length * turns * STAGES


def teachers_s(config: RunConfig, prompts: Sequence[Prompt], sampling: SamplingSpec) -> float:
    """Seconds that teachers may take for their own answers, which they report only when done."""
    longest_s = 0.0
    for name, teacher in config.teachers.items():
        health = teacher.health
        own = [prompt for prompt in prompts if prompt.teacher == name]
        longest = max(sampling.max_tokens, config.answer_tokens + config.context_tokens)
        tokens = sum(len(p.token_ids) + sampling.n * longest for p in own)
        together_s = health.timeout_s + tokens / health.min_tokens_per_s
        if (played := config.environment) is not None:
            rounds = math.ceil(len(own) * sampling.n / played.concurrency)
            together_s += rounds * played.timeouts.episode_s
        each_s = max(together_s, health.response_s(sampling.max_tokens))
        longest_s = max(longest_s, health.tries * each_s)
    return longest_s
