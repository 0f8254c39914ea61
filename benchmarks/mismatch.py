"""The distance of engines from the trainer on fresh samples, by scheme and by state of training.

    python -m benchmarks.mismatch [--steps 40] [--only float32 fp8_per_channel …]
    python -m benchmarks.mismatch [a.b.c=value …] --seeds 1 2 3 --only float32 int4_group32

Each scheme has an on-policy run of the quickstart (``staleness_threshold`` 0, ``sync_steps`` 1).
All samples are fresh, so that ``mismatch/*`` (docs/metrics.md) has the engines' precision alone, at
every step. ``fp8_per_channel`` quantizes in the engine, the others round at the sender
(``sync.fake_quantization``).

Prints one JSON line last. By scheme and metric: ``begin``, the median of the first quarter of the
steps, and ``end``, of the last one.

With ``--seeds`` each scheme has a whole run of the quickstart, as it is, for each seed. By scheme:
the accuracy of each on ``--prompts`` prompts that training has not got, their mean, and its
``points`` (per cent) above that of float32; and ``in_float32`` that of the same students in engines
that round nothing. About three minutes a run on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

from async_opd.api import distil
from async_opd.config.load import load_config
from async_opd.config.precision import FakeQuantization
from async_opd.tools.evaluate import ANSWERS, evaluate
from async_opd.tools.evaluated_model import evaluation_config
from async_opd.tools.qualify.measurements.runs import KeptMetrics

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
TRAIN = EXAMPLE.parent / "quickstart" / "data" / "train.jsonl"
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


def held_out(path: Path, count: int) -> Path:
    """A file of so many prompts of both tasks, with their answers, none of which is trained on."""
    trained = {json.loads(line)["prompt"] for line in TRAIN.read_text().splitlines()}
    draw = random.Random(0)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        digits = f"{draw.randrange(10**6):06d}"
        task, answer = draw.choice((("sort", sorted(digits)), ("reverse", digits[::-1])))
        if (prompt := f"{task} {digits}=") not in trained:
            rows[prompt] = {"prompt": prompt, "answer": "".join(answer), "data_source": task}
    path.write_text("\n".join(map(json.dumps, rows.values())))
    return path


def right(answers: Path) -> float:
    """The share of right answers in a file of an evaluation."""
    lines = answers.read_text().splitlines()
    return round(statistics.fmean(json.loads(line)["score"] for line in lines), 4)


def accuracies(scheme: str, seed: int, prompts: int, given: list[str]) -> tuple[float, float]:
    """After a whole run: of its engines, and of its student in an engine of float32."""
    with tempfile.TemporaryDirectory() as folder:
        data = held_out(Path(folder) / "held_out.jsonl", prompts)
        run_dir, apart = Path(folder) / "run", Path(folder) / "apart"
        ends = ["eval.every=0", "eval.before=false", "eval.teachers=false", f"data.eval=[{data}]"]
        overrides = [f"run_dir={run_dir}", f"seed={seed}", *ends, "log.wandb=off", SCHEMES[scheme]]
        summary = distil(EXAMPLE, overrides=[*overrides, *given])
        if summary.status != "completed":
            raise RuntimeError(f"the run of {scheme} ended as {summary.status}: {summary.error}")
        whole = ["rollout.engine.quantization=null", "rollout.engine.dtype=float32"]
        config = load_config(str(EXAMPLE), [*ends, *given, *whole])
        student = evaluation_config(config, str(run_dir), None)
        evaluate(config, student, str(EXAMPLE), None, apart)
        (last,) = (run_dir / "evals").glob("step_*.jsonl")
        return right(last), right(apart / f"{ANSWERS}.jsonl")


def compared(schemes: list[str], seeds: list[int], prompts: int, given: list[str]) -> Any:
    """Accuracies by scheme."""
    found: dict[str, Any] = {}
    for scheme in schemes:
        each = [accuracies(scheme, seed, prompts, given) for seed in seeds]
        own, apart = zip(*each, strict=True)
        found[scheme] = {"accuracy": own, "mean": statistics.fmean(own)}
        found[scheme] |= {"in_float32": apart, "mean_in_float32": statistics.fmean(apart)}
        if "float32" in found:
            points = 100 * (found[scheme]["mean"] - found["float32"]["mean"])
            found[scheme]["points"] = round(points, 2)
        print(f"{scheme}: {json.dumps(found[scheme])}", flush=True)
    return found


def main() -> None:
    """Runs the schemes one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--seeds", type=int, nargs="+", help="whole runs, and their accuracy")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of whole runs")
    given = parser.parse_args()
    if given.seeds:
        print(json.dumps(compared(given.only, given.seeds, given.prompts, given.overrides)))
        return
    found: dict[str, Any] = {}
    for scheme in given.only:
        found[scheme] = measured(scheme, given.steps)
        print(f"{scheme}: {json.dumps(found[scheme])}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
