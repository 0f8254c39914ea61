"""Every measurement, each in a separate process with a limit of time; all figures in one file.

    python -m benchmarks.gpu.all --out DIR [--device cuda|cpu] [--minutes 9.5] [--only streams,rank]

writes ``DIR/gpu.json`` (figures by script) and ``DIR/NAME.log``. A script that is still running at
its limit is killed, and what it had measured is kept. Time that a script does not use goes to the
later ones; ``rank``, which has the most cells, is the last. The scripts run with the trainer's
settings of the allocator. Exit code 1 if a script failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_opd.config.device_defaults import ALLOCATOR

SHARES = {
    "streams": 0.10,
    "scoring": 0.10,
    "fsdp": 0.10,
    "snapshot": 0.10,
    "losses": 0.20,
    "rank": 0.40,
}
"""Scripts in their order, and the share of the time that each may take."""
GRACE_S = 10.0
"""Seconds before its limit in which a script begins no further cell."""


def outcome(
    command: list[str], limit_s: float, log: Path, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The command's figures: its last line or, where it was killed or failed, its cells.

    ``settings`` are variables of its environment, unless they are set already.
    ``ended`` says how: ``done``, ``exit code N`` with the last line, or ``killed after N s``.
    """
    with log.open("wb") as file:
        environment = {**(settings or {}), **os.environ}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(limit_s)
            ended = "done" if code == 0 else f"exit code {code}{last_line(log)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"killed after {limit_s:.0f} s"
    found = [line for line in map(parsed, log.read_text().splitlines()) if line]
    whole = next((line for line in reversed(found) if "cells" in line), None)
    cells = {"cells": [line["cell"] for line in found if "cell" in line]}
    return {**(whole or cells), "ended": ended}


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
    names = options.only.split(",") if options.only else list(SHARES)
    ends, results = time.monotonic() + 60 * options.minutes, {}
    for place, name in enumerate(names):
        left = ends - time.monotonic()
        limit = max(left * SHARES[name] / sum(SHARES[one] for one in names[place:]), 1.0)
        command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--device", options.device]
        command += ["--seconds", str(max(limit - GRACE_S, 1.0))]
        log = options.out / f"{name}.log"
        results[name] = outcome(command, limit, log, ALLOCATOR[options.device])
        (options.out / "gpu.json").write_text(json.dumps(results, indent=1))
        print(f"{name}: {len(results[name]['cells'])} cells, {results[name]['ended']}", flush=True)
    print(json.dumps({name: result["ended"] for name, result in results.items()}), flush=True)
    if any(result["ended"] != "done" for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
