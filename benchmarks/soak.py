"""A long run with some very long rollouts: does anything grow, get lost, or hold a loop up?

    python -m benchmarks.soak [--rollouts N] [--long N]

Real Ray actors, queue, admission, stages, ledger, run log and trace; the engines are simulated
(``benchmarks.simulated``) and quick. 200,000 rollouts of 8 tokens (4 KiB scored, with k = 64) and,
spread evenly among them, 1,000 of 32,018 tokens (16 MiB), through a queue of 512 MiB.

    rss_growth      resident memory at the end over that at a third, the largest of all processes;
                    of each the median of a tenth of the run. It has the pages of Ray's object store
                    that the process has touched so far: the store is bounded, and shared by all
    private_growth  the same of the memory that a process has for itself: what a leak would be
    lost, duplicated  samples, by the audit of the ledger
    max_loop_lag_s  the longest time for which the loop of driver, queue or scorer was held up
    peak_memory_gib proportional set size of all processes together: shared pages count once

Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from async_opd.accounting.audit import audit
from async_opd.accounting.journal import LEDGER, Journal
from async_opd.cluster.actor_factory import Factories, Factory
from async_opd.cluster.launch import LaunchedStages, launch
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan
from async_opd.core.reports import Interval
from async_opd.core.samples import Prompt
from async_opd.core.stages import Queue
from async_opd.files.run_format import write_run_format
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Summary
from async_opd.observability.trace import TraceSink
from async_opd.pipeline import Pipeline
from async_opd.processes.loop_lag import LoopLag
from async_opd.tools.plan.setting import Lengths
from benchmarks.pipeline import Prompts
from benchmarks.simulated.replicas import SimulatedStudent
from rollouter.spec import StudentEngineSpec

TOP_K = 64
SAMPLE_BYTES = 8 + 4 + 8 * TOP_K  # of a response token with its scores
SHORT, LONG = 8, -(-(16 << 20) // SAMPLE_BYTES)
BATCH, SYNC_STEPS = 250, 4
LEAST_STEPS = 10
SAMPLE_S, PSS_EVERY = 1.0, 5
CALL_S = 60.0


class SoakStudent(SimulatedStudent):
    """One prompt in ``every`` has a long response."""

    def __init__(
        self, spec: StudentEngineSpec, queue: Queue, speed: RolloutPlan, slots: int, every: int
    ) -> None:
        super().__init__(spec, queue, speed, slots, Lengths(SHORT, 0, LONG), sync_s=0.01)
        self._every = every

    def _length(self, prompt: Prompt) -> int:
        """By the prompt's number."""
        return LONG if int(prompt.uid[1:]) % self._every == self._every // 2 else SHORT


def config(steps: int) -> RunConfig:
    """Two versions are in flight: 2,000 samples, 10 of them long."""
    return RunConfig.model_validate(
        {
            "student": {"model": "simulated"},
            "teachers": {
                "t": {"model": "simulated", "replicas": 2, "engine": {"max_num_seqs": 64}}
            },
            "data": {"train": "none.jsonl"},
            "loss": {"kind": "forward_kl", "top_k": TOP_K},
            "rollout": {
                "replicas": 4,
                "n": 1,
                "max_tokens": LONG,
                "engine": {"max_num_seqs": 64},
            },
            "train": {"steps": steps, "batch_size": BATCH},
            "async": {"staleness_threshold": 1.0, "sync_steps": SYNC_STEPS},
            "queue": {"max_mib": 512},
            "eval": {"every": 0},
            "cluster": {"device": "cpu"},
            "log": {"console": "off", "wandb": "off"},
        }
    )


@dataclass
class Progress:
    """A sink that knows the last step; ``stepped`` is set with each."""

    steps: int
    step: int = 0
    name: str = "progress"
    stepped: threading.Event = field(default_factory=threading.Event)

    @property
    def share(self) -> float:
        """Of the run that is done."""
        return self.step / self.steps

    def start(self) -> None:
        """Nothing to open."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints every hundredth."""
        self.step = step
        self.stepped.set()
        if step % 100 == 0:
            print(
                f"step {step}/{self.steps} {metrics.get('perf/samples_per_s', 0):.0f}/s", flush=True
            )

    def rewind(self) -> None:
        """Nothing."""

    def waits(self, waits: Mapping[str, str]) -> None:
        """Nothing."""

    def busy(self, pools: Mapping[str, Sequence[Interval]]) -> None:
        """Nothing."""

    def message(self, text: str, level: str = "info") -> None:
        """Prints it."""
        print(text, flush=True)

    def close(self, summary: Summary) -> None:
        """Nothing."""


Sizes = tuple[float, int, int]  # share of the run, resident bytes, those of them that are shared
Samples = defaultdict[int, list[Sizes]]  # by process id


@dataclass
class Memory:
    """Asks this process and all its descendants for their memory, in a thread, step by step."""

    progress: Progress
    samples: Samples = field(default_factory=lambda: defaultdict(list))
    names: dict[int, str] = field(default_factory=dict)
    peak: int = 0

    def __post_init__(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        self._stopped = True
        self.progress.stepped.set()
        self._thread.join()

    def growth(self, shared: bool) -> dict[str, tuple[float, float]]:
        """MiB at a third and at the end, of each process that was there both times.

        ``shared``: with the pages that others have, too. Medians of the samples between 0.3 and 0.4
        of the run, and from 0.9 on; of a run that is too short for these the nearest sample.
        """

        def mib(samples: list[Sizes], low: float, high: float) -> float:
            near = [one for one in samples if low <= one[0] < high]
            near = near or [min(samples, key=lambda one: abs(one[0] - low))]
            sizes = (rss - (0 if shared else own) for _, rss, own in near)
            return statistics.median(sizes) / (1 << 20)

        return {
            f"{self.names[pid]} {pid}": (mib(samples, 0.3, 0.4), mib(samples, 0.9, math.inf))
            for pid, samples in sorted(self.samples.items())
            if samples[0][0] < 0.4 and samples[-1][0] > 0.5
        }

    def _watch(self) -> None:
        own, count, last = psutil.Process(), 0, False
        while not last:  # at the start, in between, and once more at the end
            last = self._stopped
            share, total = self.progress.share, 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    self._note(process, share)
                    if count % PSS_EVERY == 0:
                        total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue  # it ended meanwhile
            self.peak = max(self.peak, total)
            count += 1
            if not last:
                self.progress.stepped.wait(SAMPLE_S)
                self.progress.stepped.clear()

    def _note(self, process: psutil.Process, share: float) -> None:
        self.names.setdefault(process.pid, process.name())
        memory = process.memory_info()
        self.samples[process.pid].append((share, memory.rss, memory.shared))


class Lags:
    """Of driver, queue and scorer, the longest so far."""

    def __init__(self, stages: LaunchedStages) -> None:
        proxies: dict[str, Any] = {"queue": stages.queue, "scorer": stages.scorer}
        self._remotes = {name: proxy.remote for name, proxy in proxies.items()}
        self._driver = LoopLag()

    async def drain(self) -> dict[str, float]:
        """Seconds."""
        found = {name: await remote.lag(CALL_S) for name, remote in self._remotes.items()}
        return found | {"driver": self._driver.drain()}

    def stop(self) -> None:
        """No more timers."""
        self._driver.stop()


async def soak(short: int, long: int, run_dir: Path) -> dict[str, Any]:
    """One run to its end."""
    steps = round((short + long) / BATCH)
    every = (short + long) // long
    run_config = config(steps)
    score = TeacherPlan(overhead_s=0.002, tokens_per_s=1e7)
    factories = Factories(
        student=Factory("benchmarks.soak:SoakStudent", (RolloutPlan(step_s=2e-5), 64, every)),
        teacher=Factory("benchmarks.simulated.replicas:SimulatedTeacher", (score, TOP_K)),
        trainer=Factory(
            "benchmarks.simulated.trainer:build_simulated_trainer",
            (TrainPlan(overhead_s=0.005, tokens_per_s=1e9),),
        ),
    )
    progress = Progress(steps)
    write_run_format(run_dir)
    with (
        RunLog(run_config, run_dir, sinks=[TraceSink(run_dir), progress]) as log,
        Journal(run_dir / LEDGER) as journal,
    ):
        async with launch(run_config, device="cpu", eos_ids=(), factories=factories) as stages:
            lags, memory, began = Lags(stages), Memory(progress), time.perf_counter()
            await lags.drain()  # what came before is not the run's
            try:
                await Pipeline(run_config, stages, Prompts(), None, log, journal).run()
            finally:
                wall_s = time.perf_counter() - began
                memory.stop()
            lag = await lags.drain()
            lags.stop()
        log.finish("completed")
    found = await asyncio.to_thread(audit, run_dir)
    resident, private = memory.growth(shared=True), memory.growth(shared=False)
    return {
        "rss_growth": _largest(resident),
        "private_growth": _largest(private),
        "lost": len(found.lost),
        "duplicated": len(found.duplicated),
        "max_loop_lag_s": round(max(lag.values()), 3),
        "peak_memory_gib": round(memory.peak / (1 << 30), 2),
        "wall_s": round(wall_s, 1),
        "rollouts": len(found.trained),
        "loop_lag_s": {name: round(value, 3) for name, value in lag.items()},
        "rss_mib": _rounded(resident),
        "private_mib": _rounded(private),
    }


def _largest(grown: Mapping[str, tuple[float, float]]) -> float:
    return round(max(end / third for third, end in grown.values()), 3)


def _rounded(grown: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    return {name: [round(mib, 1) for mib in pair] for name, pair in grown.items()}


def main() -> None:
    """Runs it and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=200_000, help="short ones")
    parser.add_argument("--long", type=int, default=1_000, help="of 16 MiB each")
    arguments = parser.parse_args()
    if (arguments.rollouts + arguments.long) / BATCH < LEAST_STEPS:
        parser.error(f"a tenth of a run has a step: at least {LEAST_STEPS * BATCH} rollouts")
    with tempfile.TemporaryDirectory() as folder:
        result = uvloop.run(soak(arguments.rollouts, arguments.long, Path(folder)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
