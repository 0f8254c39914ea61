"""CPU seconds of a run's processes by kind, and what a switch costs in blocks of segments."""

from __future__ import annotations

import os
import random
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

RAYS_OWN = ("DashboardAgent", "RuntimeEnvAgent", "IDLE")
"""Ray's processes that are neither driver nor stages."""
DRAWS = 2000


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of the processes with all their threads, in the kernel's nanoseconds."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def stage_pids() -> dict[str, list[int]]:
    """The driver and all actors by kind: Ray names them by their classes, and the call."""
    found = {"driver": [os.getpid()]}
    for child in psutil.Process().children(recursive=True):
        name = " ".join(child.cmdline())
        kind = re.split(r"[. ]", name.removeprefix("ray::"))[0]
        if name.startswith("ray::") and kind not in RAYS_OWN:
            found.setdefault(kind, []).append(child.pid)
    return found


@dataclass(frozen=True)
class Segment:
    """Seconds a step: CPU by kind of process, of wandb's process, of the trace; and wall."""

    by_kind: Mapping[str, float]
    wandb_s: float
    trace_s: float
    wall_s: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of driver and stages."""
        return sum(self.by_kind.values())


def summary(
    on: Sequence[Segment], off: Sequence[Segment], samples: int, activity_s: float
) -> dict[str, Any]:
    """The result of the pairs: on, off, off, on, …

    ``samples`` are those of all steps of a side whose seconds the segments have, ``activity_s`` the
    seconds of a sample's records in two replicas.
    """
    with_all, without = _of_blocks(on), _of_blocks(off)
    costs = [a / b - 1 for a, b in zip(with_all, without, strict=True)]
    total = sum(with_all)
    return {
        "cost_share": round(statistics.median(costs), 4),
        "cost_interval": interval(costs),
        "cost_ms": {
            kind: round(1000 * (_mean(on, kind) - _mean(off, kind)), 1) for kind in on[0].by_kind
        },
        "trace_share": round((sum(one.trace_s for one in on) + samples * activity_s) / total, 4),
        "wandb_process_share": round(sum(one.wandb_s for one in on) / total, 4),
        "cost_of_sums": round(total / sum(without) - 1, 4),
        "cpu_ms_per_sample": round(1000 * sum(without) / samples, 3),
        "samples_per_s": round(samples / sum(one.wall_s for one in on)),
        "samples_per_s_off": round(samples / sum(one.wall_s for one in off)),
        "blocks": len(costs),
    }


def interval(costs: Sequence[float]) -> list[float]:
    """The 2.5th and the 97.5th percentile of the median of blocks that are drawn again."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(costs, k=len(costs))) for _ in range(DRAWS)]
    parts = statistics.quantiles(medians, n=40)
    return [round(parts[0], 4), round(parts[-1], 4)]


def _mean(segments: Sequence[Segment], kind: str) -> float:
    return statistics.fmean(one.by_kind[kind] for one in segments)


def _of_blocks(segments: Sequence[Segment]) -> list[float]:
    """CPU seconds of both segments of each block."""
    seconds = [one.cpu_s for one in segments]
    return [a + b for a, b in zip(seconds[::2], seconds[1::2], strict=True)]
