"""The cost of random kills: processes die every so many seconds, then the ledger is audited.

    python -m benchmarks.chaos --minutes M --seed S [--every 30] [--out DIR] [a.b.c=value …]

Two runs of the quickstart (two student replicas; ``eval.every=0``). The first is left alone for a
sixth of M minutes, at least ten seconds, and says how long a step takes. The second has as many
steps as train in 0.6 M minutes undisturbed, which take about M minutes. Every ``--every`` seconds
one process of it, drawn at random, is killed (-9) or, one in six, stopped (SIGSTOP): a student's or
a teacher's engine or actor, the scorer, the queue, the trainer. Nothing is killed while the victim
of the kill before is still down: a repair that takes longer than ``--every`` puts the next one off,
and ``s_per_kill`` says how often there really was one.

    time lost per kill   (seconds of the second run - those of the first for as many steps) / kills
    throughput_ratio     steps a second of the second run over those of the first

Prints every kill and recovery, and one JSON line last: ``kills``, ``recoveries``, ``lost``,
``duplicated``, ``steps``, ``lost_s_per_kill``, ``s_per_kill``, ``status``, ``throughput_ratio``. A
run may be over before its last victim is repaired: then there is one recovery less than there are
kills, and a line says so. Exit code 1 unless the run is completed, with nothing lost and nothing
trained twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from async_opd.accounting.audit import audit

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
OVERRIDES = (
    *("rollout.replicas=2", "eval.every=0", "eval.teachers=false", "eval.max_prompts=16"),
    *("supervision.max_restarts=50", "supervision.timeout_s=15"),
    *("teachers.sort.health.timeout_s=15", "teachers.reverse.health.timeout_s=15"),
    *("sync.timeout_s=15", "checkpoint.every=5", "log.wandb=off", "log.console=plain"),
)
BOXES = (
    "student/0",
    "student/1",
    "teacher sort/0",
    "teacher reverse/0",
    "scorer",
    "queue",
    "trainer",
)
RECOVERED = ("is rebuilt", "the run goes on after step", "serves again")
POLL_S = 0.2
STALL_S = 600.0
ENDLESS = 100_000
"""Steps of a run that is interrupted."""
EXPECTED_RATIO = 0.6
"""Throughput with a kill every 30 s, over that without any."""


@dataclass
class Run:
    """``async_opd run`` in a separate process, observed through its files."""

    directory: Path
    steps: int
    overrides: tuple[str, ...]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Starts it."""
        command = [sys.executable, "-m", "async_opd", "run", str(EXAMPLE)]
        command += ["--run-dir", str(self.directory), f"train.steps={self.steps}"]
        with (self.directory.parent / f"{self.directory.name}.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *OVERRIDES, *self.overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """``run.log`` so far."""
        path = self.directory / "run.log"
        return path.read_text() if path.exists() else ""

    @property
    def times(self) -> list[float]:
        """When each step was logged that its weights have made, then those after a rewind."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [e["time"] for e in map(json.loads, lines) if "loss/total" in e]

    @property
    def status(self) -> str:
        """completed, failed or interrupted."""
        path = self.directory / "summary.json"
        return str(json.loads(path.read_text())["status"]) if path.exists() else "killed"

    def until_training(self) -> bool:
        """Waits for the first step; false if the run ends before."""
        while not self.times and self.process.poll() is None:
            time.sleep(POLL_S)
        return bool(self.times)

    def victims(self, box: str) -> dict[str, psutil.Process]:
        """The processes of a box: its ``actor`` and perhaps its ``engine``."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if child.environ().get("ASYNC_OPD_ACTOR") == box:
                    if "EngineCore" in child.name():
                        found["engine"] = child
                    elif "ray::" in child.name():
                        found["actor"] = child
            except psutil.Error:
                continue  # gone meanwhile
        return found


def undisturbed(out: Path, minutes: float, overrides: tuple[str, ...]) -> float:
    """Seconds that a step takes."""
    run = Run(out / "undisturbed", ENDLESS, overrides)
    if run.until_training():
        time.sleep(60 * minutes)
    run.process.send_signal(signal.SIGINT)
    run.process.wait(STALL_S)
    times = run.times
    if len(times) < 2:
        raise RuntimeError(f"{run.directory} made {len(times)} steps; see {run.directory}.txt")
    return (times[-1] - times[0]) / (len(times) - 1)


@dataclass
class Blows:
    """Kills at random, one after the other."""

    run: Run
    random: random.Random
    every: float
    kills: int = 0
    recoveries: int = 0

    def strike(self) -> None:
        """Until the run ends; a kill waits until the one before is repaired."""
        due = time.monotonic() + self.every
        while not self._ends_within(max(due - time.monotonic(), 0)):
            repairs = self._repairs()
            what = self._kill()
            if what is None:
                due = time.monotonic() + POLL_S
                continue
            self.kills += 1
            began = time.monotonic()
            due = began + self.every
            print(f"{time.strftime('%X')} kill {self.kills}: {what}", flush=True)
            while self._repairs() == repairs and not self._ends_within(POLL_S):
                if time.monotonic() - began > STALL_S:
                    print(f"no recovery within {STALL_S:g} s", flush=True)
                    self.run.process.send_signal(signal.SIGINT)
                    return
            if self._repairs() > repairs:
                self.recoveries += 1
                took = time.monotonic() - began
                print(f"{time.strftime('%X')} repaired after {took:.1f} s", flush=True)
        if self.recoveries < self.kills:
            print(f"the run was over before the repair after kill {self.kills}", flush=True)

    def _kill(self) -> str | None:
        box = self.random.choice(BOXES)
        processes = self.run.victims(box)
        if not processes:
            return None
        role = self.random.choice(sorted(processes))
        stop = self.random.random() < 1 / 6
        try:
            processes[role].send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
        except psutil.NoSuchProcess:
            return None
        return f"{box}, its {role}, {'stopped' if stop else 'killed'}"

    def _repairs(self) -> int:
        """Number of repairs in the run's log."""
        log = self.run.log.replace("trainer is rebuilt", "")  # the run has yet to go on
        return sum(log.count(words) for words in RECOVERED)

    def _ends_within(self, seconds: float) -> bool:
        try:
            self.run.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def disturbed(
    out: Path, steps: int, seed: int, every: float, overrides: tuple[str, ...]
) -> dict[str, Any]:
    """The figures of the second run, but for those that need the first."""
    run = Run(out / "disturbed", steps, overrides)
    blows = Blows(run, random.Random(seed), every)
    if run.until_training():
        blows.strike()
    run.process.wait(STALL_S)
    times = run.times
    found = audit(str(run.directory))
    return {
        "kills": blows.kills,
        "recoveries": blows.recoveries,
        "lost": len(found.lost) + len(found.in_flight),
        "duplicated": len(found.duplicated),
        "steps": len(times),
        "status": run.status,
        "seconds": times[-1] - times[0] if times else 0.0,
    }


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="chaos"))
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    overrides = ("train.warmup_steps=1", *args.overrides)
    step_s = undisturbed(out, max(args.minutes / 6, 1 / 6), overrides)
    print(f"undisturbed: {step_s:.2f} s a step; runs in {out}", flush=True)
    steps = max(2, round(60 * args.minutes * EXPECTED_RATIO / step_s))
    result = disturbed(out, steps, args.seed, args.every, overrides)
    seconds = result.pop("seconds")
    calm = step_s * (result["steps"] - 1)
    result["lost_s_per_kill"] = (seconds - calm) / max(result["kills"], 1)
    result["s_per_kill"] = seconds / max(result["kills"], 1)
    result["throughput_ratio"] = calm / seconds if seconds else 0.0
    print(f"disturbed: {result['steps']} steps in {seconds:.1f} s")
    print(json.dumps(result))
    return int(result["status"] != "completed" or result["lost"] > 0 or result["duplicated"] > 0)


if __name__ == "__main__":
    sys.exit(main())
