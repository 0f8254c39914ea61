"""The planner's prediction for the change that a verdict suggests.

run directory ──plan.measured──► speeds ──simulated as it is, and with one change──► gain
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_opd.core.errors import ConfigError
from async_opd.observability.run_log import METRICS
from async_opd.tools.plan.advice import Split, current, steady_state
from async_opd.tools.plan.inputs import setting_of
from async_opd.tools.plan.measured import read_run
from async_opd.tools.plan.setting import Setting
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.verdict import Verdict, display_name

WORTH = 0.05
"""A change that gains so much is suggested without a look at the following ones."""
LEAST = 0.01
"""A smaller gain is none: two plans differ by as much for reasons that no run has."""


NO_GAIN = f"The plan predicts less than {LEAST:+.0%} for each change that it knows."


@dataclass(frozen=True)
class Forecast:
    """``change`` in words; ``gain`` is predicted samples/s over those without it, minus 1."""

    change: str
    gain: float

    def __str__(self) -> str:
        """One sentence for the verdict."""
        return f"With {self.change}, the plan predicts {self.gain:+.0%} samples/s."


def forecast(run: RecordedRun, verdict: Verdict) -> Forecast | str:
    """The forecast of the verdict's change, or why there is none ('' where no change is asked)."""
    if verdict.kind in ("healthy", "grader", "unknown"):
        return ""
    try:
        measured = read_run(run.folder)
        setting = setting_of(measured.config, measured.plan, str(run.folder / "config.yaml"))
        return _best(setting, verdict)
    except ConfigError as error:
        problem = error.problems[0]
        return f"There is no prediction: {problem.key or METRICS} {problem.message}."


def _best(setting: Setting, verdict: Verdict) -> Forecast | str:
    """ConfigError if it cannot be simulated."""
    found = changes(setting, verdict)
    if not found:
        return "There is no prediction: the pool that limits has no GPUs of this run."
    now = steady_state(setting).samples_per_s
    best = Forecast("", LEAST)
    for what, to in found:
        gain = steady_state(to).samples_per_s / now - 1
        if gain > best.gain:
            best = Forecast(what, gain)
        if best.gain >= WORTH:
            break
    return best if best.change else NO_GAIN


def changes(setting: Setting, verdict: Verdict) -> list[tuple[str, Setting]]:
    """Settings with a change that the verdict asks for, the best to have first, and its words."""
    if verdict.kind == "sync":
        steps = 2 * setting.sync_steps
        return [(f"async.sync_steps {steps}", replace(setting, sync_steps=steps))]
    if verdict.kind in ("lengths", "budget"):
        threshold = setting.staleness_threshold + 1
        changed = replace(setting, staleness_threshold=threshold)
        return [(f"async.staleness_threshold {threshold:g}", changed)]
    return list(_other_splits(setting, verdict))


@dataclass(frozen=True)
class _Pool:
    name: str
    replicas: int
    gpus: int
    """Of one replica; 0 for an external server."""


def _other_splits(setting: Setting, verdict: Verdict) -> Iterator[tuple[str, Setting]]:
    """Replicas of each starved pool that can spare some, given to the pool that limits.

    The last one gives it one more than the run has.
    """
    pools = {pool.name: pool for pool in _pools(setting)}
    limiting = pools[verdict.pool]
    if not limiting.gpus:
        return
    for donor in (pools[name] for name in verdict.starved if pools[name].gpus):
        least = setting.least_ranks if donor.name == "train" else 1
        fewer = math.ceil(limiting.gpus / donor.gpus)
        if donor.replicas - fewer >= least:
            counts = {donor.name: -fewer, limiting.name: fewer * donor.gpus // limiting.gpus}
            words = f"{fewer * donor.gpus} of {donor.replicas * donor.gpus} GPUs"
            words += f" of {display_name(donor.name)} moved to {display_name(limiting.name)}"
            yield words, _split(setting, counts)
    words = f"{limiting.gpus} more GPU{'s' * (limiting.gpus > 1)} for {display_name(limiting.name)}"
    yield words, _split(setting, {limiting.name: 1})


def _pools(setting: Setting) -> Iterator[_Pool]:
    yield _Pool("rollout", setting.rollout.replicas, setting.rollout.gpus)
    for teacher in setting.teachers:
        yield _Pool(f"teacher/{teacher.name}", teacher.replicas, teacher.gpus)
    yield _Pool("train", setting.ranks, 1)


def _split(setting: Setting, more: dict[str, int]) -> Setting:
    """The setting with so many more replicas of these pools."""
    now = current(setting)
    teachers = tuple(
        count + more.get(f"teacher/{teacher.name}", 0)
        for teacher, count in zip(setting.teachers, now.teachers, strict=True)
    )
    split = Split(now.rollout + more.get("rollout", 0), teachers, now.ranks + more.get("train", 0))
    return split.apply(setting)
