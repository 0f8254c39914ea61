"""Every objective of ``examples/objectives`` on the quickstart's real task: final accuracy.

    python -m benchmarks.objectives [a.b.c=value …] [--out DIR] [--only NAME …]

Each example is a whole run of ``async_opd run`` (3 to 4 minutes on two idle cores). Runs found in
``--out`` are not made again, so that the table can be made in parts. Prints the table as Markdown,
then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples" / "objectives"


@dataclass(frozen=True)
class Result:
    """Accuracies are shares of the evaluation's prompts; staleness is in weight versions."""

    objective: str
    sort: float
    reverse: float
    staleness_mean: float


def run(example: Path, out: Path, overrides: list[str]) -> Result:
    """Runs an example unless its completed run is there. RuntimeError if the run fails."""
    directory = out / example.stem
    if not _completed(directory):
        command = [
            *(sys.executable, "-m", "async_opd", "run", str(example)),
            *("--run-dir", str(directory), "eval.teachers=false", "eval.every=0"),
            *("log.console=off", "log.wandb=off", *overrides),
            *(["--resume"] if directory.exists() else []),  # it was interrupted
        ]
        code = subprocess.run(command, check=False).returncode
        if code or not _completed(directory):
            raise RuntimeError(f"{example.stem}: exit code {code}; see {directory}/summary.json")
    return _read(example.stem, directory)


def _completed(directory: Path) -> bool:
    summary = directory / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


def _read(name: str, directory: Path) -> Result:
    summary = json.loads((directory / "summary.json").read_text())
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    steps = [line for line in lines if "perf/step_s" in line]
    return Result(
        objective=name,
        sort=summary["eval/sort/accuracy"],
        reverse=summary["eval/reverse/accuracy"],
        staleness_mean=round(statistics.fmean(line["staleness/mean"] for line in steps), 2),
    )


def table(results: list[Result]) -> str:
    """The results as Markdown."""
    rows = ["| example | sort | reverse | mean staleness |", "|---|--:|--:|--:|"]
    rows += [
        f"| `{r.objective}` | {r.sort:.1%} | {r.reverse:.1%} | {r.staleness_mean:.2f} |"
        for r in results
    ]
    return "\n".join(rows)


def main() -> None:
    """Runs what is missing and prints all examples asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    examples = {example.stem: example for example in sorted(EXAMPLES.glob("*.yaml"))}
    parser.add_argument("--only", nargs="+", choices=examples, default=list(examples))
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value")
    arguments = parser.parse_args()
    results = []
    for name in arguments.only:
        results.append(run(examples[name], arguments.out, arguments.overrides))
        print(results[-1], flush=True)
    print(table(results))
    print(json.dumps({"objectives": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
