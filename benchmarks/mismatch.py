"""The distance of engines from the trainer on fresh samples, by scheme and by state of training.

    python -m benchmarks.mismatch [--steps 40] [--only float32 fp8_per_channel …]

Each scheme has an on-policy run of the quickstart (``staleness_threshold`` 0, ``sync_steps`` 1).
All samples are fresh, so that ``mismatch/*`` (docs/metrics.md) has the engines' precision alone, at
every step. ``fp8_per_channel`` quantizes in the engine, the others round at the sender
(``sync.fake_quantization``).

Prints one JSON line last. By scheme and metric: ``begin``, the median of the first quarter of the
steps, and ``end``, of the last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

from async_opd.api import distil
from async_opd.config.precision import FakeQuantization
from async_opd.tools.qualify.measurements.runs import KeptMetrics

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
METRICS = ("kl", "p99", "error", "ess")
SCHEMES = {
    "float32": "sync.fake_quantization=null",
    "fp8_per_channel": "rollout.engine.quantization=fp8_per_channel",
    **{name: f"sync.fake_quantization={name}" for name in get_args(FakeQuantization)},
}
"""Overrides of the quickstart's config, by name."""


def measured(scheme: str, steps: int) -> dict[str, dict[str, float]]:
    """Of one run, by metric. RuntimeError if it does not complete."""
    kept = KeptMetrics()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"run_dir={folder}/run",
            f"train.steps={steps}",
            "train.batch_size=64",
            "train.warmup_steps=0",
            "async.staleness_threshold=0",
            "async.sync_steps=1",
            "eval.every=0",
            "eval.max_prompts=4",
            "log.wandb=off",
            SCHEMES[scheme],
        ]
        summary = distil(EXAMPLE, callbacks=[kept], overrides=overrides)
    if summary.status != "completed":
        raise RuntimeError(f"the run of {scheme} ended as {summary.status}: {summary.error}")
    quarter = max(steps // 4, 1)
    figures = {}
    for metric in METRICS:
        values = kept.values(f"mismatch/{metric}")  # [nan] where no step had fresh samples
        parts = {"begin": values[:quarter], "end": values[-quarter:]}
        figures[metric] = {part: round(statistics.median(v), 7) for part, v in parts.items()}
    return figures


def main() -> None:
    """Runs the schemes one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for scheme in given.only:
        found[scheme] = measured(scheme, given.steps)
        print(f"{scheme}: {json.dumps(found[scheme])}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
