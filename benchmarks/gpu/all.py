"""Every measurement, each in a forked process with a limit of time; all figures in one file.

    python -m benchmarks.gpu.all --out DIR [--device cuda|cpu] [--minutes 9.5] [--only streams,rank]

writes ``DIR/gpu.json`` (figures by script) and ``DIR/NAME.log``. A script that is still running at
its limit is killed, and what it had measured is kept. Time that a script does not use goes to the
later ones. The scripts run with the trainer's
settings of the allocator. Exit code 1 if a script failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from async_opd.config.device_defaults import ALLOCATOR

SHARES = {
    "families": 0.10,
    "weights": 0.08,
    "noise": 0.04,
    "streams": 0.06,
    "scoring": 0.05,
    "fsdp": 0.06,
    "state": 0.12,
    "snapshot": 0.03,
    "losses": 0.11,
    "rank": 0.35,
}
"""Scripts in their order, and the share of the time that each may take."""
GRACE_S = 10.0
"""Seconds before its limit in which a script begins no further cell."""


def outcome(name: str, arguments: list[str], limit_s: float, log: Path) -> dict[str, Any]:
    """The script's figures: its last line or, where it was killed or failed, its cells.

    ``ended`` says how: ``done``, ``exit code N`` with the last line, or ``killed after N s``.
    """
    process = multiprocessing.get_context("fork").Process(target=run, args=(name, arguments, log))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        ended = f"killed after {limit_s:.0f} s"
    else:
        code = process.exitcode
        ended = "done" if code == 0 else f"exit code {code}{last_line(log)}"
    found = [line for line in map(parsed, log.read_text().splitlines()) if line]
    whole = next((line for line in reversed(found) if "cells" in line), None)
    cells = {"cells": [line["cell"] for line in found if "cell" in line]}
    return {**(whole or cells), "ended": ended}


def run(name: str, arguments: list[str], log: Path) -> None:
    """The script, in its process; what it prints is in the log."""
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    importlib.import_module(f"benchmarks.gpu.{name}").main(arguments)


def last_line(log: Path) -> str:
    """The last line that is not a result, after a colon; empty if there is none."""
    printed = [line for line in log.read_text().splitlines() if line and not parsed(line)]
    return f": {printed[-1]}" if printed else ""


def parsed(line: str) -> dict[str, Any]:
    """The line's JSON object; an empty one for any other text."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--minutes", type=float, default=9.5)
    made.add_argument("--only", help=f"of {', '.join(SHARES)}; by commas")
    options = made.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update({**ALLOCATOR[options.device], **os.environ})
    importlib.import_module("transformers")  # once, with torch, for all processes: it takes seconds
    names = options.only.split(",") if options.only else list(SHARES)
    ends, results = time.monotonic() + 60 * options.minutes, {}
    for place, name in enumerate(names):
        left = ends - time.monotonic()
        limit = max(left * SHARES[name] / sum(SHARES[one] for one in names[place:]), 1.0)
        given = ["--device", options.device, "--seconds", str(max(limit - GRACE_S, 1.0))]
        results[name] = outcome(name, given, limit, options.out / f"{name}.log")
        (options.out / "gpu.json").write_text(json.dumps(results, indent=1))
        print(f"{name}: {len(results[name]['cells'])} cells, {results[name]['ended']}", flush=True)
    print(json.dumps({name: result["ended"] for name, result in results.items()}), flush=True)
    if any(result["ended"] != "done" for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
