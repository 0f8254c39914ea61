"""Calibrates turnarounds: the control plane's time between two pieces of work of one loop.

No run measures turnarounds directly, but they decide how many requests run on a replica and how
many rollouts a teacher finds when it asks for some. So the calibrated turnarounds are those with
which the simulated run has the real run's requests per replica and rollouts per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.simulation import shortened, simulate

SAMPLES = 50_000
"""Samples of each simulated run."""
ROUNDS = 8
LONGEST = 2.0
"""The longest turnaround, as a multiple of a full replica's time for one piece of work."""


def calibrate(setting: Setting, running: float, batches: Mapping[str, float]) -> Setting:
    """Finds the turnarounds that give ``running`` requests and ``batches[teacher]`` rollouts.

    The former is the mean number on a replica, the latter the mean of a batch.

    The rollout pool's is found first, by bisection, then the teachers', all at the same time.
    """
    short = shortened(setting, SAMPLES)
    pool = setting.rollout

    def full_enough(seconds: Mapping[str, float]) -> dict[str, bool]:
        found = simulate(_with_rollout(short, seconds[""]))
        return {"": found.concurrency > running}

    request_s = setting.response_tokens * pool.speed.step(pool.running)
    rollout = _bisect({"": LONGEST * request_s}, full_enough)[""]
    short = _with_rollout(short, rollout)

    def too_small(seconds: Mapping[str, float]) -> dict[str, bool]:
        found = simulate(_with_teachers(short, seconds))
        return {name: found.batches[name] < size for name, size in batches.items()}

    tokens = setting.prompt_tokens + setting.response_tokens
    longest = {
        teacher.name: LONGEST * teacher.speed.seconds(round(teacher.batch * tokens))
        for teacher in setting.teachers
    }
    return _with_teachers(_with_rollout(setting, rollout), _bisect(longest, too_small))


def _bisect(
    longest: Mapping[str, float], too_short: Callable[[Mapping[str, float]], Mapping[str, bool]]
) -> dict[str, float]:
    """The seconds of each name at which ``too_short`` becomes false; 0 if it is never true."""
    brackets = {name: [0.0, seconds] for name, seconds in longest.items()}
    for _ in range(ROUNDS):
        middle = {name: sum(bracket) / 2 for name, bracket in brackets.items()}
        for name, short in too_short(middle).items():
            brackets[name][0 if short else 1] = middle[name]
    return {name: low for name, (low, _) in brackets.items()}


def _with_rollout(setting: Setting, seconds: float) -> Setting:
    speed = setting.rollout.speed.model_copy(update={"turnaround_s": seconds})
    return replace(setting, rollout=replace(setting.rollout, speed=speed))


def _with_teachers(setting: Setting, seconds: Mapping[str, float]) -> Setting:
    return replace(
        setting,
        teachers=tuple(
            replace(t, speed=t.speed.model_copy(update={"turnaround_s": seconds[t.name]}))
            for t in setting.teachers
        ),
    )
