"""How close the pipeline comes to its slowest stage, and what asynchrony buys.

    python -m benchmarks.pipeline [--samples N] [--only s1 s05 s075 on_policy s1_64 s1_4]

Real Ray actors, queue, admission and stages; the engines are simulated (``benchmarks.simulated``):
16 rollout replicas of 32 slots, log-normal lengths (sigma 1), 4 teacher replicas, one trainer,
batch 128, K = 4. The stages' own limits are within 10 % of each other: trainer, teachers,
rollout in this order.

    efficiency            samples/s over the smallest limit at s = 1
    efficiency_s05, _s075   the same at s = 0.5 and 0.75 (``benchmarks.half_version`` says why)
    speedup_over_on_policy  over the same pools at s = 0, K = 1, batch 512
    cpu_ms_per_sample     CPU time of the control plane: the driver, with admission, ledger,
                        versions and metrics; queue and scorer (the data plane) are beside it
    wait_s                the trainer's wait for a batch, by the step of a weight version
    efficiency_64         64 rollout and 16 teacher replicas, batch 512, at twice the samples/s:
                        what two cores carry beside the 80 processes of the simulated engines
    efficiency_4        4 rollout replicas and one teacher, batch 32

Prints one JSON line last. About 15 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import uvloop

from async_opd.cluster.actor_factory import Factories, Factory
from async_opd.cluster.launch import LaunchedStages, launch
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan
from async_opd.core.samples import Prompt
from async_opd.pipeline import Pipeline
from async_opd.tools.plan.setting import Lengths

PROMPT_TOKENS = 100
LENGTHS = Lengths(mean=400, sigma=1.0, most=4096)
RATE = 64.0  # samples/s of the trainer, the slowest stage
MARGIN = 1.05  # teachers over trainer, rollout over teachers


def mean_length(lengths: Lengths = LENGTHS) -> float:
    """Mean response length after the cut, by 200,000 draws."""
    random_ = random.Random(0)
    return statistics.fmean(lengths.sample(random_) for _ in range(200_000))


@dataclass(frozen=True)
class Case:
    """One run. ``scale`` multiplies pools and batch; ``rate`` is the trainer's, in samples/s.

    ``warm_up`` weight versions pass before anything is measured. ``slots``: requests that run on a
    replica of the student; ``scored``: rollouts of a batch of a teacher's replica.
    """

    name: str
    s: float
    sync_steps: int = 4
    batch: int = 128
    scale: float = 1
    rate: float = RATE
    top_k: int = 16
    warm_up: int = 3
    lengths: Lengths = LENGTHS
    students: int = 16
    teachers: int = 4
    slots: int = 32
    scored: int = 32
    cluster: str | None = None  # the address of the one to join
    payloads: str = "auto"  # queue.payloads

    def limits(self, tokens: float) -> dict[str, float]:
        """Samples/s of each stage alone, never waiting, for samples of so many tokens."""
        decode, score, train = speeds(self)
        size, teachers, students = self.pools
        lap = decode.step(self.slots) * (tokens - PROMPT_TOKENS)
        return {
            "train": size / train.seconds(size * tokens),
            "teachers": teachers * self.scored / score.seconds(self.scored * tokens),
            "rollout": students * self.slots / lap,
        }

    @property
    def pools(self) -> tuple[int, int, int]:
        """Samples of a batch, replicas of the teacher and of the student."""
        sizes = (self.batch, self.teachers, self.students)
        batch, teachers, students = (round(size * self.scale) for size in sizes)
        return batch, teachers, students

    @property
    def config(self) -> RunConfig:
        """The run's config; models are names only."""
        size, teachers, students = self.pools
        return RunConfig.model_validate(
            {
                "student": {"model": "simulated"},
                "teachers": {
                    "t": {
                        "model": "simulated",
                        "replicas": teachers,
                        "engine": {"max_num_seqs": self.scored},
                    }
                },
                "data": {"train": "none.jsonl"},
                "loss": {"kind": "forward_kl", "top_k": self.top_k},
                "rollout": {
                    "replicas": students,
                    "n": 1,
                    "max_tokens": self.lengths.most,
                    "engine": {"max_num_seqs": self.slots},
                },
                "train": {"steps": 10**6, "batch_size": size},
                "async": {"staleness_threshold": self.s, "sync_steps": self.sync_steps},
                "eval": {"every": 0},
                "cluster": {"device": "cpu", "address": self.cluster},
                "queue": {"payloads": self.payloads},
            }
        )


CASES = {
    case.name: case
    for case in (
        Case("s1", 1.0),
        Case("s05", 0.5),
        Case("s075", 0.75),
        Case("on_policy", 0.0, sync_steps=1, batch=512, warm_up=1),  # synchronous: no transient
        Case("s1_64", 1.0, scale=4, rate=2 * RATE),
        Case("s1_4", 1.0, scale=0.25),
    )
}


def speeds(case: Case) -> tuple[RolloutPlan, TeacherPlan, TrainPlan]:
    """The stages' speeds at full occupancy: the case's rate, teachers 5 %, rollout 10 % above it.

    A decoding step costs 1/64 more for each request: memory-bound, as decoding is.
    """
    mean = mean_length(case.lengths)
    tokens = mean + PROMPT_TOKENS
    step = case.students * case.scale * case.slots / (case.rate * MARGIN**2 * mean)
    step_s = step / (1 + case.slots / 64)
    decode = RolloutPlan(step_s=step_s, step_s_per_request=step_s / 64)
    # tokens/s, overhead included
    per_replica = case.rate * MARGIN * tokens / (case.teachers * case.scale)
    seconds = case.scored * tokens / per_replica - 0.005
    score = TeacherPlan(overhead_s=0.005, tokens_per_s=case.scored * tokens / seconds)
    overhead_s = 0.02
    size = 128 * case.scale
    step_seconds = size / case.rate - overhead_s
    rate = size * tokens / step_seconds
    train = TrainPlan(overhead_s=overhead_s, tokens_per_s=rate, snapshot_s=0.05, sync_s=0.1)
    return decode, score, train


class Prompts:
    """Numbered prompts without end."""

    def __init__(self) -> None:
        self._count = 0
        self.metrics: dict[str, float] = {}

    def next(self, count: int) -> list[Prompt]:
        """The next ones."""
        self._count += count
        ids = np.zeros(PROMPT_TOKENS, dtype=np.int32)
        numbers = range(self._count - count, self._count)
        return [Prompt(f"p{number}", "t", "t", ids) for number in numbers]


@dataclass
class Log:
    """Keeps when each step was logged, and its staleness and busy shares."""

    steps: list[dict[str, float]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last: dict[str, float] = field(default_factory=dict)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step."""
        self.steps.append({**metrics, "at": time.perf_counter()})
        self.changed.set()

    def summarize(self, metrics: Mapping[str, float]) -> None:
        """Nothing to keep."""

    def waits(self, waits: Mapping[str, str]) -> None:
        """Nothing to keep."""

    def busy(self, pools: Mapping[str, Any]) -> None:
        """Nothing to keep."""

    def message(self, text: str, level: str = "info") -> None:
        """Nothing to keep."""

    async def until(self, steps: int) -> None:
        """Waits until so many steps are logged."""
        while len(self.steps) < steps:
            self.changed.clear()
            await self.changed.wait()


async def control_plane(stages: LaunchedStages) -> list[psutil.Process]:
    """Driver, queue and scorer."""
    proxies: list[Any] = [stages.queue, stages.scorer]
    pids = [await proxy.remote._handle.pid.remote() for proxy in proxies]
    return [psutil.Process(), *(psutil.Process(pid) for pid in pids)]


def cpu_s(processes: list[psutil.Process]) -> list[float]:
    """CPU seconds of each."""
    return [sum(process.cpu_times()[:2]) for process in processes]


async def run(case: Case, samples: int) -> dict[str, Any]:
    """Runs until ``samples`` more are trained after the warm-up; rates are of those."""
    config = case.config
    decode, score, train = speeds(case)
    factories = Factories(
        student=Factory(
            "benchmarks.simulated.replicas:SimulatedStudent",
            (decode, case.slots, case.lengths, train.sync_s),
        ),
        teacher=Factory("benchmarks.simulated.replicas:SimulatedTeacher", (score, case.top_k)),
        trainer=Factory("benchmarks.simulated.trainer:build_simulated_trainer", (train,)),
    )
    size, every = config.train.batch_size, config.async_.sync_steps
    first = case.warm_up * every
    last = first + max(every, samples // size // every * every)
    log = Log()
    async with launch(config, device="cpu", eos_ids=(), factories=factories) as stages:
        control = await control_plane(stages)
        pipeline = asyncio.create_task(Pipeline(config, stages, Prompts(), None, log).run())
        try:
            await _either(log.until(first), pipeline)
            before = cpu_s(control)
            await _either(log.until(last), pipeline)
            after = cpu_s(control)
        finally:
            pipeline.cancel()
            await asyncio.gather(pipeline, return_exceptions=True)
    measured = log.steps[first:last]
    trained = len(measured) * size
    rate = trained / (measured[-1]["at"] - log.steps[first - 1]["at"])
    limits = case.limits(sum(step["train/tokens"] for step in measured) / trained)
    limit = min(limits.values())
    used = [1000 * (b - a) / trained for a, b in zip(before, after, strict=True)]

    def mean(key: str, steps: list[dict[str, float]] = measured) -> float:
        return round(statistics.fmean(step[key] for step in steps if key in step), 3)

    waits = [mean("train/wait_s", measured[at::every]) for at in range(every)]

    return {
        "samples_per_s": round(rate, 2),
        "limits": {stage: round(value, 2) for stage, value in limits.items()},
        "efficiency": round(rate / limit, 3),
        "samples": trained,
        "cpu_ms_per_sample": round(used[0], 3),
        "cpu_ms_queue": round(used[1], 3),
        "cpu_ms_scorer": round(used[2], 3),
        "busy_train": mean("train/busy"),
        "in_flight": mean("rollout/in_flight"),
        "staleness_mean": mean("staleness/mean"),
        "staleness_max": max(step["staleness/max"] for step in measured),
        "sync_s": mean("sync/seconds"),
        "wait_s": waits,
    }


async def _either(wanted: Any, pipeline: asyncio.Task[None]) -> None:
    """Awaits the log, or the error of the pipeline that will never fill it."""
    waiting = asyncio.ensure_future(wanted)
    await asyncio.wait({waiting, pipeline}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        await pipeline


async def measure(names: list[str], samples: int) -> dict[str, Any]:
    """All cases asked for, one after the other."""
    found = {}
    for name in names:
        wanted = 1536 if name == "on_policy" else round(samples * CASES[name].scale)
        found[name] = await run(CASES[name], wanted)
        print(name, found[name], flush=True)
    result: dict[str, Any] = {}
    if "s1" in found:
        result["efficiency"] = found["s1"]["efficiency"]
        result["cpu_ms_per_sample"] = found["s1"]["cpu_ms_per_sample"]
    for name in ("s05", "s075"):
        if name in found:
            result[f"efficiency_{name}"] = found[name]["efficiency"]
    if {"s1", "on_policy"} <= set(found):
        ratio = found["s1"]["samples_per_s"] / found["on_policy"]["samples_per_s"]
        result["speedup_over_on_policy"] = round(ratio, 2)
    for replicas in (64, 4):
        if f"s1_{replicas}" in found:
            result[f"efficiency_{replicas}"] = found[f"s1_{replicas}"]["efficiency"]
    return result | {"cases": found}


def main() -> None:
    """Runs the cases and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=6144, help="measured, with 16 replicas")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    print(json.dumps(uvloop.run(measure(arguments.only, arguments.samples))))


if __name__ == "__main__":
    main()
