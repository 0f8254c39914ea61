"""The sections ``eval`` and ``grading``: accuracy during a run, and bounds of graders."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from async_opd.config.sections.elastic import Pooled, ReplicasOrNone
from async_opd.config.sections.section import Count, Name, Section, steps_or_versions

FILES = 64
"""Bound of all files with answers of evaluations, as a multiple of ``samples_mib``."""


class EvalConfig(Pooled, Section):
    """Accuracy on ``data.eval``: before training, every ``every`` weight versions, and after."""

    every: int | None = Field(default=5, ge=0)
    """Weight versions between two evaluations; 0: only before and after."""
    every_steps: Count | None = None
    """Training steps between two evaluations, instead of ``every``. At a step within a version the
    weights that the engines have are measured, and ``eval/oldest_version`` names them."""
    before: bool = True
    """Also measures the student before training."""
    max_prompts: Count | None = None
    """Number of prompts of each data source, from the first on; by default all."""
    n: Count = 1
    """Answers to each prompt, from which ``mean@n``, ``pass@k`` and ``maj@n`` are computed. Several
    need a ``temperature`` above 0."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampling."""
    max_tokens: Count | None = None
    """Longest response; by default ``rollout.max_tokens``."""
    grader: str = "exact"
    """``exact``; ``math_verify``; ``gsm8k`` (the number after ``####``, in the box, or the last
    one); ``regex:PATTERN``, whose first group in its last match is the answer; or a function,
    ``module:function`` or ``file.py:function``, that takes (response, row) and returns a number
    from 0 to 1, or a pair of it and the answer that it read from the response (for ``maj@n``). A
    function with an argument ``solution_str`` is called as verl calls its ``compute_score``. Rows
    from reasoning-gym are graded by their own verifier."""
    correct_at: float = Field(default=1.0, gt=0, le=1)
    """Least score of an answer that ``pass@k`` counts as correct."""
    samples_mib: float = Field(default=16, ge=0)
    """Maximum size of ``evals/step_N.jsonl``, which has the answers of the evaluation at step N,
    of each data source equally many; 0: no files. All files together take at most 64 times as much:
    those of the oldest steps make room for others."""
    replicas: ReplicasOrNone = 0
    """Engines that only evaluate, as ``rollout`` says otherwise, on dedicated GPUs, or ``{min: 1,
    max: 4}`` of them: an evaluation then measures exactly one weight version, and takes nothing
    from the rollouts. 0: the rollout replicas evaluate beside their rollouts, which may take
    several versions."""
    teachers: bool = True
    """Also measures each teacher on its own data sources once, before training."""

    @model_validator(mode="before")
    @classmethod
    def _one_period(cls, given: Any) -> Any:
        return steps_or_versions(given)

    @property
    def samples_total_mib(self) -> float:
        """Maximum size of all files in ``evals``."""
        return FILES * self.samples_mib


class GradingConfig(Section):
    """Bounds of graders, which run in separate processes, so that a hanging one can be ended."""

    timeout_s: float = Field(default=60, gt=0)
    """Timeout of grading one response. Its grader's process is ended then, and the response is a
    dead letter; an evaluation counts it, and excludes it from the mean."""
    processes: Count = 4
    """Maximum of grader processes, and of responses graded at the same time, in each student
    replica (for a reward) and in the driver (for evaluation). They start when they are needed."""
    memory_gb: float = Field(default=16, gt=0)
    """Memory bound of a grader's process, in 1e9 bytes of its data (``RLIMIT_DATA``: mapped
    files do not count). A larger allocation fails, and the response is a dead letter. Each process
    that a grader starts has the same bound."""
    pass_env: list[Name] = Field(default=[])
    """Further environment variables that graders get, such as the URL and the key of a judge. By
    themselves graders inherit only variables of a list, which hold no secret: paths, languages,
    numbers of threads, devices and caches (``INHERITED`` in
    ``processes/user_process.py``)."""
    allow_eval: bool = False
    """Allows reasoning-gym tasks whose verifiers evaluate responses as Python (puzzle24, countdown,
    n_queens and others, see ``grading/graders.py``): a response can then run code as the user.
    Otherwise ``check`` refuses graded rows of these tasks, and their responses are dead letters."""
