"""Faults between the trainer's weights and what replicas sample from: are they found, and at once?

    Learner ──TrainerStage──► Publisher ──gloo──► StudentReplica: a vLLM engine in this process
                                │ one of FAULTS is injected at its seam, for one sync
                                ▼
              BroadcastSync with Freshness ──► which have wrong weights

A Qwen2 of two layers, with biases and a tied head; norms and biases are moved away from the values
that the engine starts with. Twelve faults, with engines in float32, in bfloat16 and with weights
and activations in float8 (``fp8_per_channel``), which have four faults of quantization more; after
each of them the replica joins again without the fault. Then syncs without a fault, whose weights
change as in training, each one compared: any replica found wrong is a false alarm. Then the
smallest change that the rows' log-probabilities show, when an update that makes it is ignored: a
step of AdamW that moves every weight by so much; and whether one of SMALL_STEP is found, by
digests. At last, of a finished run of the quickstart: ``cost_share`` are the seconds of digests,
references and comparisons over those of its training.

``python -m benchmarks.freshness RUN_DIR`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_opd.models.engine_args import engine_env
from async_opd.weight_sync.digests import Digests
from benchmarks.freshness_faults import caught, faults_of, shown
from benchmarks.freshness_world import STEP, World, make_student, world

SMALL_STEP = 1e-6
"""A learning rate of fine-tuning: what a step of AdamW moves a weight by."""
KINDS = ("float32", "bfloat16", "fp8_per_channel")
"""Dtypes of engines, and a scheme by which they quantize their weights."""


async def false_alarms(w: World, syncs: int) -> int:
    """Replicas found to have wrong weights in so many syncs without a fault."""
    found, most = 0, 0.0
    for _ in range(syncs):
        w.move(STEP / 10)
        metrics = await w.push()
        most = max(most, metrics["sync/freshness_nats"] / metrics["sync/freshness_limit_nats"])
        found += len(w.failures)
        await w.mend()
    print(f"  {syncs} syncs: {found} false alarms, at most {most:.2f} of the bound", flush=True)
    return found


async def smallest_visible(w: World) -> dict[str, float]:
    """The smallest step of AdamW that the rows show if its update is ignored, and the bound.

    Steps grow by a factor of 1.8; below the smallest visible one digests decide.
    """
    rows = w.trainer._held_rows
    bound = (await w.push())["sync/freshness_limit_nats"]
    engine = (await w.replicas[0].evidence(rows)).logprobs
    weights = [weight.detach().clone() for weight in w.model.parameters()]
    step, nats = 1e-9, 0.0
    while nats <= bound:
        step *= 10**0.25
        w.move(step)
        nats = mean_difference(w.learner.reference(rows).logprobs, engine)
        for weight, before in zip(w.model.parameters(), weights, strict=True):
            weight.data.copy_(before)
    print(f"  smallest visible step {step:.2g}; bound {bound:.2g} nats", flush=True)
    return {"step": float(f"{step:.2g}"), "nats": float(f"{bound:.2g}")}


def mean_difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Mean absolute difference of the rows' log-probabilities, in nats."""
    return float(np.abs(np.concatenate(one) - np.concatenate(other)).mean())


async def digest_seconds(w: World, times: int = 20) -> float:
    """The time of the digests in one sync, at both ends."""
    started = time.perf_counter()
    for _ in range(times):
        digests = Digests(torch)
        deque(digests.add_all(w.publisher._snapshot), maxlen=0)
        digests.values()
    both = 2 * (time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(times):
        await w.replicas[0]._rpc("record_received")
        await w.replicas[0]._rpc("received_digests")
    return (both + time.perf_counter() - started) / times


def cost_share(lines: list[dict[str, Any]], digests_s: float) -> float:
    """Seconds of digests and comparisons over those from the first step to the last.

    ``lines``: of a run's ``metrics.jsonl``.
    """
    pushes = sum("sync/seconds" in line for line in lines)
    costs = ("sync/reference_s", "sync/freshness_s")
    spent = pushes * digests_s + sum(line.get(key, 0.0) for line in lines for key in costs)
    times = [line["time"] for line in lines if "loss/total" in line]
    return float(spent / (max(times) - min(times)))


async def measured(path: Path, kind: str, syncs: int) -> dict[str, Any]:
    """All but the cost, of engines of one dtype or scheme."""
    print(kind, flush=True)
    async with world(path, kind) as w:
        w.move()
        await w.push()
        found = await shown(w)
        alarms = await false_alarms(w, syncs)
        visible = await smallest_visible(w)
        below = await caught(w, "ignored update", SMALL_STEP)
        print(f"  ignored update of a step of {SMALL_STEP}: {below.splitlines()[:1]}", flush=True)
        digests_s = await digest_seconds(w)
    return {
        "caught": len(found),
        "false_alarms": alarms,
        "smallest_visible": visible,
        "caught_below": bool(below),
        "digests_s": digests_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--syncs", type=int, default=500, help="without a fault, for each dtype")
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="of a run of the quickstart")
    parser.add_argument("--dtypes", nargs="+", choices=KINDS, default=KINDS, help="of engines")
    given = parser.parse_args()
    lines = [json.loads(line) for line in (given.run / "metrics.jsonl").read_text().splitlines()]
    os.environ.update(engine_env("cpu"))
    with tempfile.TemporaryDirectory() as directory:
        path = make_student(Path(directory))
        by_dtype = {d: asyncio.run(measured(path, d, given.syncs)) for d in given.dtypes}
    digests_s = by_dtype[given.dtypes[0]]["digests_s"]
    print(
        json.dumps(
            {
                "faults": {kind: len(faults_of(kind)) for kind in given.dtypes},
                "caught": {dtype: found["caught"] for dtype, found in by_dtype.items()},
                "syncs": given.syncs * len(given.dtypes),
                "false_alarms": sum(found["false_alarms"] for found in by_dtype.values()),
                "caught_at_1e-6": {d: found["caught_below"] for d, found in by_dtype.items()},
                "smallest_visible": {d: found["smallest_visible"] for d, found in by_dtype.items()},
                "cost_share": round(cost_share(lines, digests_s), 5),
            }
        )
    )


if __name__ == "__main__":
    main()
