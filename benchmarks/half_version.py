"""The costs of s = 0.5: the case of ``benchmarks.pipeline`` in virtual time, without each of them.

    python -m benchmarks.half_version

No Ray and no engines: the simulator of ``async_opd plan``, 400 steps, the same response lengths in
every row. Half batches and batches of 4 leave the weight versions, and with them the budget, as
they are: they show what a trainer would gain that begins a step before its batch is complete.

    share       samples/s over the smallest of the stages' own limits, for the lengths trained
    staleness   mean, in weight versions
    in flight   mean samples admitted and not trained: in engines, prompts that wait for a slot,
                with teachers, scored ones that wait for a batch, and the batch that is computed

Prints a table, and one JSON line last. About 10 seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from async_opd.core.stages import PROMPTS, SCORED, rollouts_topic
from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.simulation import simulate
from benchmarks.pipeline import CASES
from benchmarks.plan import setting

STEPS = 400


def variants() -> dict[str, Setting]:
    """The settings by what is changed."""
    case = CASES["s05"]
    plain = setting(case, STEPS * case.batch)
    instant = {"snapshot_s": 0.0, "sync_s": 0.0}
    free_sync = replace(plain, train=plain.train.model_copy(update=instant))
    (teacher,) = plain.teachers
    speed = teacher.speed.model_copy(update={"tokens_per_s": 1e12, "overhead_s": 0.0})
    teachers = (replace(teacher, speed=speed),)
    return {
        "s = 0.5": plain,
        "a sync takes no time": free_sync,
        "teachers take no time": replace(plain, teachers=teachers),
        "half batches": _smaller(plain, 2),
        "batches of 4": _smaller(plain, 32),
        "all of them": _smaller(replace(free_sync, teachers=teachers), 32),
        "K = 6": replace(plain, sync_steps=6),
        "s = 0.62": replace(plain, staleness_threshold=0.62),
        "s = 0.75": replace(plain, staleness_threshold=0.75),
        "s = 1": replace(plain, staleness_threshold=1.0),
    }


def _smaller(plain: Setting, factor: int) -> Setting:
    """Batches of a ``factor``-th, with as many samples a version, and a step's overhead shared."""
    overhead_s = plain.train.overhead_s / factor
    return replace(
        plain,
        batch_size=plain.batch_size // factor,
        sync_steps=plain.sync_steps * factor,
        steps=plain.steps * factor,
        train=plain.train.model_copy(update={"overhead_s": overhead_s}),
    )


def measure(of: Setting) -> dict[str, float]:
    """The figures of a row."""
    found = simulate(of, endless=True)
    longer = (of.prompt_tokens + of.response_tokens) / found.sample_tokens
    rollout, teacher, train = found.pools
    name = of.teachers[0].name
    slots = of.rollout.replicas * of.rollout.running
    batches = teacher.busy * teacher.replicas * found.batches[name]
    return {
        "samples_per_s": found.samples_per_s,
        "share": found.samples_per_s / (found.bottleneck.limit * longer),
        "staleness": found.mean_staleness,
        "engines": rollout.used * slots,
        "prompts": found.queues[PROMPTS],
        "teachers": found.queues[rollouts_topic(name)] + batches,
        "scored": found.queues[SCORED],
        "computed": train.busy * of.batch_size,
    }


def _line(name: str, row: Mapping[str, float]) -> str:
    first, *parts = row.items()
    rates = [f"{first[1]:7.1f}", *(f"{value:7.3f}" for _, value in parts[:2])]
    return f"{name:<22}" + "".join(rates + [f"{value:9.0f}" for _, value in parts[2:]])


def main() -> None:
    """Prints the table."""
    rows = {name: measure(of) for name, of in variants().items()}
    titles = ("samples", "share", "stale", *list(rows["s = 0.5"])[3:])
    print(f"{'':<22}" + "".join(f"{one:>{7 if at < 3 else 9}}" for at, one in enumerate(titles)))
    for name, row in rows.items():
        print(_line(name, row))
    rounded = {
        name: {key: round(value, 3) for key, value in row.items()} for name, row in rows.items()
    }
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
