"""The cost of observing a run: everything on against everything off, in CPU seconds.

    python -m benchmarks.observability [--blocks N] [--students N] [--batch N]

Real Ray actors, queue, admission, stages and ledger; the engines are simulated
(``benchmarks.simulated``) and so quick that the control plane is what limits: 8 rollout and 2
teacher replicas, responses of 400 tokens, k = 16, batch 1024, K = 2. One run, in which segments of
4 steps with everything on (reports of all pools, metrics.jsonl, run.log, wandb offline, trace, live
view on a terminal of 120 columns) take turns with segments without any of it: on, off, off, on, …
A segment admits its samples and ends when all of them are trained, so that each begins and ends
with empty queues: every one is the same work of every stage.
``log.microscope`` is as by default: it records nothing.

    cost_share        CPU seconds of driver and stages with everything on over those without,
                      less 1: the median of the blocks of four segments (on, off, off, on)
    cost_interval     95 % of the medians of 2,000 draws of as many blocks, with replacement
    cost_of_sums      the same of all segments together
    cost_ms           what a step costs more with everything on, by kind of process, in CPU ms
    trace_share       CPU seconds of the trace (its writer, the calls that fill it, the records of
                      intervals in the replicas) over all of driver and stages
    wandb_process_share  the same for wandb's own process, which is neither driver nor stage

User and system time of each process, all its threads included; without Ray's own processes.
Prints one JSON line last. About 4 minutes. ``taskset -c 1`` keeps all of it on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from async_opd.accounting.journal import LEDGER, Journal
from async_opd.cluster.actor_factory import Factories, Factory
from async_opd.cluster.launch import launch
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan
from async_opd.core.reports import Interval, Level, StepReport
from async_opd.core.samples import DeadLetter
from async_opd.observability.activity import Activity
from async_opd.observability.live.console import LiveConsole, open_console
from async_opd.observability.live.live_file import LiveFile
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Sink
from async_opd.observability.trace import Pools, TraceSink
from async_opd.observability.wandb_sink import SERVICE, WandbSink
from async_opd.pipeline import Pipeline
from async_opd.tools.plan.setting import Lengths
from benchmarks.cpu_costs import Segment, cpu_s, stage_pids, summary
from benchmarks.pipeline import Prompts, _either

SYNC_STEPS, TOP_K = 2, 16
STEPS = 2 * SYNC_STEPS
"""Steps of a segment."""
COLUMNS, ROWS = 120, 40


def config(run_dir: Path, sizes: argparse.Namespace) -> RunConfig:
    """The run's config; models are names only."""
    engine = {"max_num_seqs": 128}
    return RunConfig.model_validate(
        {
            "student": {"model": "simulated"},
            "teachers": {"t": {"model": "simulated", "replicas": 2, "engine": engine}},
            "data": {"train": "none.jsonl"},
            "loss": {"kind": "forward_kl", "top_k": TOP_K},
            "rollout": {
                "replicas": sizes.students,
                "n": 1,
                "max_tokens": 4096,
                "engine": engine,
            },
            "train": {"steps": 10**6, "batch_size": sizes.batch},
            "async": {"staleness_threshold": 1.0, "sync_steps": SYNC_STEPS},
            "eval": {"every": 0},
            "cluster": {"device": "cpu"},
            "log": {"console": "live", "wandb": "offline"},
            "run_dir": str(run_dir),
        }
    )


class TimedTrace(TraceSink):
    """A trace that knows its CPU seconds."""

    cpu_s = 0.0

    def busy(self, pools: Pools) -> None:
        """See TraceSink."""
        begun = time.thread_time()
        super().busy(pools)
        TimedTrace.cpu_s += time.thread_time() - begun

    def _write(self, waiting: list[Pools]) -> None:
        begun = time.thread_time()
        super()._write(waiting)
        TimedTrace.cpu_s += time.thread_time() - begun


@dataclass
class SwitchedLog:
    """A run's log, or none. Counts steps in both cases."""

    steps: int = 0
    real: RunLog | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last: Mapping[str, float] = field(default_factory=dict)

    def counted(self) -> None:
        """One more step is trained."""
        self.steps += 1
        self.changed.set()

    async def until(self, steps: int) -> None:
        """Waits until so many steps are trained."""
        while self.steps < steps:
            self.changed.clear()
            await self.changed.wait()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See RunLog; so are the others."""
        if self.real:
            self.real.log(step, metrics)

    def summarize(self, metrics: Mapping[str, float]) -> None:
        if self.real:
            self.real.summarize(metrics)

    def waits(self, waits: Mapping[str, str]) -> None:
        if self.real:
            self.real.waits(waits)

    def busy(self, pools: Mapping[str, Sequence[Interval]]) -> None:
        if self.real:
            self.real.busy(pools)

    def message(self, text: str, level: Level = "info") -> None:
        if self.real:
            self.real.message(text, level)

    def dead_letter(self, letter: DeadLetter) -> None:
        if self.real:
            self.real.dead_letter(letter)


@dataclass
class SwitchedPipeline(Pipeline):
    """Asks the pools for reports, and meters a step, only while there is a log.

    Admits ``left`` samples, and then none until there are more.
    """

    left: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def _admit(self) -> None:
        while True:
            while not self.left:
                self.more.clear()
                await self.more.wait()
            admission = self.run_state.admission
            groups = admission.try_admit(1, await admission.room(1, min(64, self.left)))
            self.left -= groups
            await self._issue(self.run_state.supply.groups(groups))

    async def segment(self) -> None:
        """Trains ``STEPS`` steps, from empty queues to empty queues."""
        assert isinstance(self.log, SwitchedLog)
        self.left += STEPS * self.config.train.batch_size
        self.more.set()
        await self.log.until(self.log.steps + STEPS)

    async def _meter(self, report: StepReport) -> None:
        assert isinstance(self.log, SwitchedLog)
        if self.log.real:
            await super()._meter(report)
        self.log.counted()


@contextmanager
def terminal() -> Iterator[Any]:
    """A terminal of ``COLUMNS``, which another process reads."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    reader = subprocess.Popen(
        ["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(master)
    try:
        with os.fdopen(slave, "w") as file:
            yield file
    finally:
        reader.terminate()
        reader.wait()


@contextmanager
def everything(log: SwitchedLog, run_config: RunConfig) -> Iterator[Switch]:
    """Opens a run's log with all sinks of the default config on a live terminal, as a run does."""
    run_dir = Path(run_config.run_dir)
    run_dir.mkdir()
    with terminal() as file:
        console = open_console(run_config, file=file)
        assert isinstance(console, LiveConsole)
        sinks: list[Sink] = [TimedTrace(run_dir), WandbSink(run_config, run_dir)]
        viewers: list[Sink] = [LiveFile(run_dir), console]
        with RunLog(run_config, run_dir, sinks=sinks, viewers=viewers) as real:
            switch = Switch(log, real, console)
            yield switch
            switch.turn(True)
            real.finish("completed")
        if real.failures:
            raise RuntimeError(f"{real.failures} calls of sinks failed: {run_dir / 'run.log'}")


@dataclass
class Switch:
    """Turns the log of a run on and off, and the thread that draws the live view."""

    log: SwitchedLog
    real: RunLog
    console: LiveConsole
    on: bool = True

    def turn(self, on: bool) -> None:
        """Nothing is logged and drawn while it is off."""
        if self.on and not on:
            self.console.stop()
        if on and not self.on:
            self.console.show()
        self.on, self.log.real = on, self.real if on else None


def wandb_pids() -> list[int]:
    """wandb's own processes."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.name() == SERVICE]


def activity_s(count: int = 20_000) -> float:
    """CPU seconds of one sample's records of intervals in a replica."""
    activity = Activity("generate")
    begun = time.thread_time()
    for number in range(count):
        with activity.busy() as since:
            activity.sampled(f"p{number}/0", since)
    return (time.thread_time() - begun) / count


async def segment(
    made: SwitchedPipeline, pids: Mapping[str, Sequence[int]], wandb: Sequence[int]
) -> Segment:
    """The next ``STEPS`` steps."""

    def now() -> list[float]:
        kinds = map(cpu_s, pids.values())
        return [*kinds, cpu_s(wandb), TimedTrace.cpu_s, time.perf_counter()]

    before = now()
    await made.segment()
    *kinds, wandb_s, trace_s, wall_s = ((b - a) / STEPS for a, b in zip(before, now(), strict=True))
    return Segment(dict(zip(pids, kinds, strict=True)), wandb_s, trace_s, wall_s)


async def measure(sizes: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All segments of one run."""
    score = TeacherPlan(overhead_s=0.01, tokens_per_s=1e9)
    factories = Factories(
        student=Factory(
            "benchmarks.simulated.replicas:SimulatedStudent",
            (RolloutPlan(step_s=5e-4), 128, Lengths(400, 0.5, 4096), 0.01),
        ),
        teacher=Factory("benchmarks.simulated.replicas:SimulatedTeacher", (score, TOP_K)),
        trainer=Factory(
            "benchmarks.simulated.trainer:build_simulated_trainer",
            (TrainPlan(overhead_s=0.01, tokens_per_s=1e9, snapshot_s=0.001),),
        ),
    )
    log, found = SwitchedLog(), {True: list[Segment](), False: list[Segment]()}
    run_config = config(folder / "run", sizes)
    with everything(log, run_config) as switch, Journal(folder / LEDGER) as journal:
        async with launch(run_config, device="cpu", eos_ids=(), factories=factories) as stages:
            made = SwitchedPipeline(run_config, stages, Prompts(), None, log, journal)
            pipeline = asyncio.create_task(made.run())
            try:
                switch.turn(True)
                for _ in range(2):
                    await _either(made.segment(), pipeline)
                pids, wandb = stage_pids(), wandb_pids()
                for turn in range(4 * sizes.blocks):
                    switch.turn(turn % 4 in (0, 3))
                    found[switch.on].append(one := await segment(made, pids, wandb))
                    print("on " if switch.on else "off", one, file=sys.__stdout__, flush=True)
            finally:
                pipeline.cancel()
                await asyncio.gather(pipeline, return_exceptions=True)
    samples = sizes.batch * len(found[True])  # of one step of each segment
    return summary(found[True], found[False], samples, 2 * activity_s())


def main() -> None:
    """Runs it and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("blocks", 6), ("students", 8), ("batch", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = uvloop.run(measure(sizes, Path(folder)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
