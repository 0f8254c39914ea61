"""What scoring while the student decodes brings a whole on-policy run.

    python -m benchmarks.early_on_policy [--spreads S ...] [--early N]

The pools of ``benchmarks.pipeline`` (real actors, queue and stages, simulated engines, all stages
equally fast) at s = 0, K = 1, batch 512: all rollouts begin together, and the trainer waits for the
last score. Responses of 400 tokens in the mean, log-normal with each spread (sigma): with 0 all end
at once. Samples/s with pieces of N tokens, and without; ``gain`` is with over without.

Prints one JSON line last. About 2 minutes a run, 2 runs a spread.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import uvloop

from async_opd.plan.speeds import Lengths
from benchmarks.pipeline import CASES, LENGTHS, run


async def measure(spreads: list[float], early: int, steps: int) -> dict[str, Any]:
    """With and without, one after the other."""
    result: dict[str, Any] = {}
    for spread in spreads:
        case = replace(CASES["on_policy"], lengths=Lengths(LENGTHS.mean, spread, LENGTHS.most))
        rates = {}
        for way, tokens in (("whole", 0), ("early", early)):
            found = await run(replace(case, early_tokens=tokens), steps * case.batch)
            rates[way] = found["samples_per_s"]
            print(spread, way, found, flush=True)
        result[f"spread_{spread:g}"] = rates | {"gain": round(rates["early"] / rates["whole"], 3)}
    return result


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--spreads", type=float, nargs="+", default=[1.0, 0.3, 0.0])
    parser.add_argument("--early", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(uvloop.run(measure(arguments.spreads, arguments.early, arguments.steps))))


if __name__ == "__main__":
    main()
