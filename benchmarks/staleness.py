"""Costs and gains of staleness: the quickstart's real task under every s, K and divergence.

    python -m benchmarks.staleness [--out DIR] [--staleness 0 0.5] [--sync-steps 1] [--loss …]

Each cell is a whole run of ``async_opd run examples/quickstart.yaml`` (about 3 minutes on two
cores). Cells found in ``--out`` are not run again, so that the table can be made in parts. Prints
the table as Markdown, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
TASKS = ("sort", "reverse")


@dataclass(frozen=True)
class Cell:
    """One setting."""

    loss: str
    staleness_threshold: float
    sync_steps: int

    @property
    def name(self) -> str:
        """Its directory."""
        return f"{self.loss}-s{self.staleness_threshold:g}-K{self.sync_steps}"


@dataclass(frozen=True)
class Result:
    """The figures of a cell's run. Accuracies are shares of the evaluation's prompts.

    ``train_s`` are the seconds of all steps, without start and evaluations; ``samples_per_s`` is
    the median over steps; staleness is in weight versions.
    """

    loss: str
    s: float
    K: int
    sort: float
    reverse: float
    train_s: float
    samples_per_s: float
    staleness_mean: float
    staleness_max: float


def run(cell: Cell, out: Path, overrides: list[str]) -> Result:
    """Runs a cell unless its completed run is there. RuntimeError if the run fails."""
    directory = out / cell.name
    if not _completed(directory):
        command = [
            *(sys.executable, "-m", "async_opd", "run", str(EXAMPLE)),
            *("--staleness-threshold", f"{cell.staleness_threshold:g}"),
            *("--sync-steps", str(cell.sync_steps), "--run-dir", str(directory)),
            *(f"loss.kind={cell.loss}", "eval.every=0", "eval.teachers=false"),
            *("log.console=off", "log.wandb=off", *overrides),
            *(["--resume"] if directory.exists() else []),  # it was interrupted
        ]
        code = subprocess.run(command, check=False).returncode
        if code or not _completed(directory):
            raise RuntimeError(f"{cell.name}: exit code {code}; see {directory}/summary.json")
    return _read(cell, directory)


def _completed(directory: Path) -> bool:
    summary = directory / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


def _read(cell: Cell, directory: Path) -> Result:
    summary = json.loads((directory / "summary.json").read_text())
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    steps = [line for line in lines if "perf/step_s" in line]
    return Result(
        loss=cell.loss,
        s=cell.staleness_threshold,
        K=cell.sync_steps,
        sort=summary["eval/sort/accuracy"],
        reverse=summary["eval/reverse/accuracy"],
        train_s=round(sum(line["perf/step_s"] for line in steps), 1),
        samples_per_s=round(statistics.median(line["perf/samples_per_s"] for line in steps), 1),
        staleness_mean=round(statistics.fmean(line["staleness/mean"] for line in steps), 2),
        staleness_max=max(line["staleness/max"] for line in steps),
    )


def table(results: list[Result]) -> str:
    """The results as Markdown."""
    rows = [
        "| loss | s | K | sort | reverse | seconds | samples/s | staleness mean | max |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows += [
        f"| {r.loss} | {r.s:g} | {r.K} | {r.sort:.1%} | {r.reverse:.1%} | {r.train_s:.0f} | "
        f"{r.samples_per_s:.0f} | {r.staleness_mean:.2f} | {r.staleness_max:.0f} |"
        for r in results
    ]
    return "\n".join(rows)


def main() -> None:
    """Runs what is missing and prints all cells asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--loss", nargs="+", default=["forward_kl", "reverse_kl"])
    parser.add_argument("--staleness", nargs="+", type=float, default=[0.0, 0.5, 1.0, 4.0])
    parser.add_argument("--sync-steps", nargs="+", type=int, default=[1, 4])
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value")
    arguments = parser.parse_args()
    axes = (arguments.loss, arguments.staleness, arguments.sync_steps)
    results = []
    for cell in itertools.starmap(Cell, itertools.product(*axes)):
        results.append(run(cell, arguments.out, arguments.overrides))
        print(results[-1], flush=True)
    print(table(results))
    print(json.dumps({"cells": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
