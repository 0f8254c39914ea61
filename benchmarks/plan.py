"""How close the planner comes to real Ray actors with simulated engines.

    python -m benchmarks.plan [--samples N] [--only s1 s05 …] [--measured FILE]

Runs the cases of ``benchmarks.pipeline`` (or takes what it printed, from FILE), simulates the same
settings in virtual time, and compares. Nothing is fitted: both are given the same speeds.

    efficiency     samples/s over the smallest limit of the stages, at the lengths that were drawn
    error          predicted over measured efficiency, minus 1      worst_error: the largest |error|
    predict_s      seconds the prediction took

Prints one JSON line last. About 15 minutes without FILE.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from async_opd.config.sections.plan import PlanConfig
from async_opd.tools.plan.inputs import setting_of
from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.simulation import simulate
from benchmarks.pipeline import (
    CASES,
    PROMPT_TOKENS,
    Case,
    measure,
    speeds,
)

SEEDS = 5
"""Predictions are means over so many draws of lengths; a run is one draw."""


def setting(case: Case, samples: int) -> Setting:
    """The case as the planner gets it, with as many steps as are measured."""
    decode, score, train = speeds(case)
    config = case.config
    plan = PlanConfig.model_validate(
        {
            "prompt_tokens": PROMPT_TOKENS,
            "response_tokens": case.lengths.mean,
            "response_sigma": case.lengths.sigma,
            "rollout": decode,
            "teachers": {"t": score},
            "train": train,
        }
    )
    found = setting_of(config, plan, "benchmarks.plan")
    warm_up = case.warm_up * config.async_.sync_steps
    steps = warm_up + samples // config.train.batch_size
    rollout = replace(found.rollout, in_flight=case.slots)  # simulated engines have no queue
    return replace(found, rollout=rollout, steps=steps)


def compare(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """The case's prediction beside what was measured."""
    started = time.perf_counter()
    planned = setting(case, int(measured["samples"]))
    found = [simulate(planned, seed=seed, endless=True) for seed in range(SEEDS)]
    seconds = (time.perf_counter() - started) / SEEDS

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    rate = mean([one.samples_per_s for one in found])
    efficiency = mean(
        [one.samples_per_s / min(case.limits(one.sample_tokens).values()) for one in found]
    )
    return {
        "samples_per_s": round(rate, 2),
        "samples_per_s_measured": measured["samples_per_s"],
        "efficiency": round(efficiency, 3),
        "efficiency_measured": measured["efficiency"],
        "error": round(efficiency / measured["efficiency"] - 1, 4),
        "staleness": round(mean([one.mean_staleness for one in found]), 3),
        "staleness_measured": measured["staleness_mean"],
        "busy_train": round(mean([one.pools[-1].busy for one in found]), 3),
        "busy_train_measured": measured["busy_train"],
        "predict_s": round(seconds, 2),
    }


def main() -> None:
    """Measures or reads, predicts, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=6144, help="measured, with 16 replicas")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--measured", type=Path, help="what benchmarks.pipeline printed")
    arguments = parser.parse_args()
    if arguments.measured is None:
        result = uvloop.run(measure(arguments.only, arguments.samples))
    else:
        result = json.loads(arguments.measured.read_text(encoding="utf-8").splitlines()[-1])
    cases = {}
    for name, measured in result["cases"].items():
        cases[name] = compare(CASES[name], measured)
        print(name, cases[name], flush=True)
    worst = max(abs(case["error"]) for case in cases.values())
    print(json.dumps({"worst_error": worst, "cases": cases}))


if __name__ == "__main__":
    main()
