"""Time and memory of the chunked loss, against the straightforward way of computing the same.

    ours              hidden states ──chunks──► loss, gradients of hidden states and head
    straightforward   hidden states ──► all logits ──► log_softmax ──► divergence ──► backward

Forward KL, forward and backward, float32 on CPU: 2048 tokens, vocabulary 151,936, hidden 256; over
the teacher's top 64 with a bucket for the rest, and over the full vocabulary from the teacher's
hidden states (its head has hidden 256 too). Every measurement is a separate process, the two ways
in turn; peak memory is the rise of the resident set's high-water mark over what the inputs take.

``python -m benchmarks.losses`` prints one JSON object last; ratios are ours over straightforward,
of medians; ``cpu_ratio`` is that of processor time, which a busy machine changes less than the
clock's. ``difference`` is the largest relative one of loss and gradients between the two.
Row ``losses`` of ``async_opd qualify`` measures it on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from async_opd.tools.qualify.measurements.losses import (
    Problem,
    difference,
    ours,
    problem,
    straightforward,
)

CASES = ("topk", "full_vocab")
WAYS = {"ours": ours, "straightforward": straightforward}

FIGURES = (
    ("memory", "mib", 1 << 20, "bytes"),
    ("time", "s", 1, "seconds"),
    ("cpu", "cpu_s", 1, "cpu_seconds"),
)
"""Name of the ratio, suffix and unit of the figures, key of the measurement."""


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (most since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(case: str, way: str, tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """Seconds and peak extra bytes of one forward and backward pass, after a small warm-up."""
    run = WAYS[way]
    full = problem(case, tokens, vocabulary, hidden)
    run(problem(case, 64, 4096, hidden))
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    started, used = time.perf_counter(), time.process_time()
    run(full)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    return {"seconds": seconds, "cpu_seconds": used, "bytes": resident("VmHWM") - before}


def in_a_process(case: str, way: str, sizes: argparse.Namespace) -> dict[str, float]:
    """The same in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.losses", "--measure", case, way]
    for name in ("tokens", "vocabulary", "hidden", "threads"):
        command += [f"--{name}", str(getattr(sizes, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(case: str, sizes: argparse.Namespace) -> dict[str, float]:
    """Medians of both ways in turn."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(sizes.repeats):
        for way, runs in found.items():
            runs.append(in_a_process(case, way, sizes))
            print(case, way, {k: round(v, 2) for k, v in runs[-1].items()}, flush=True)
    result: dict[str, Any] = {}
    for name, suffix, unit, key in FIGURES:
        mine, theirs = (statistics.median(one[key] for one in found[way]) for way in WAYS)
        result[f"{name}_ratio"] = round(mine / theirs, 3)
        result[f"ours_{suffix}"] = round(mine / unit, 2)
        result[f"straightforward_{suffix}"] = round(theirs / unit, 2)
    small: Problem = problem(case, 256, 4096, 64)
    return result | {"difference": difference(small)}


def main() -> None:
    """Measures, or is one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure:
        sizes = (arguments.tokens, arguments.vocabulary, arguments.hidden)
        print(json.dumps(measure(*arguments.measure, *sizes)))
    else:
        print(json.dumps({case: compare(case, arguments) for case in CASES}))


if __name__ == "__main__":
    main()
