"""``async_opd qualify``: its options, the order of rows, and what it prints.

Exit codes: 0 all rows that could run have passed, 1 a row failed, is incomplete or was left for a
later call, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path

from async_opd.core.errors import ConfigError, Problem
from async_opd.tools.qualify.rows import ROWS

OK, FAILED = 0, 1


def add_qualify(parser: argparse.ArgumentParser) -> None:
    """Measures on this machine what no test of async_opd can show without a GPU.

    Writes one report: a row for each such part of docs/status.md, the riskiest first, with its
    figures, its criterion and whether it passed. No network is used: models are made on the spot.
    Rows that need only torch and transformers run without ray, vllm and pydantic. On a machine
    without a GPU all rows run that need none, at small sizes. A second call with the same --out
    goes on after the rows that have ended. Exit code 0: all rows that could run have passed; 1: a
    row failed, or a further call is needed.

      async_opd qualify --out report.json
      async_opd qualify --out report.json --minutes 10
      async_opd qualify --out again.json --only streams,weights
      async_opd qualify --list

    Attach the report to an issue: it is all that a maintainer needs.
    """
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--out", type=Path, metavar="FILE", help="the report (JSON)")
    chosen.add_argument("--list", action="store_true", help="print the rows; measure nothing")
    parser.add_argument("--gpus", type=int, metavar="N", help="use at most N GPUs (default: all)")
    what = "begin no row that may take longer than what is left of M minutes (default: all rows)"
    parser.add_argument("--minutes", type=float, metavar="M", help=what)
    parser.add_argument("--only", metavar="ROWS", help="these rows, by commas, also ended ones")
    parser.set_defaults(command=_qualify)


def _qualify(given: argparse.Namespace) -> int:
    if given.list:
        for name, row in ROWS.items():
            print(f"{name} (at most {row.minutes:g} minutes, needs {row.needs()}): {row.shows}")
            print(f"    passes: {row.criterion()}")
        return OK
    names = _wanted(given)
    from async_opd.tools.qualify import harness

    machine = harness.machine_of(given.gpus)
    report = harness.report_in(given.out, machine)
    try:
        report.write()
    except OSError as error:
        message, remedy = f"cannot be written: {error}", "give another --out"
        raise ConfigError.of("", message, remedy, str(given.out)) from error
    harness.preload(machine["device"])
    print(f"{_counted(machine['gpus'], 'GPU')}; {machine['device_name']}", flush=True)
    left = report.measure(names, again=bool(given.only), minutes=given.minutes or math.inf)
    outcomes = Counter(row["outcome"] for row in report.rows.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    ended = {name: row["outcome"] for name, row in report.rows.items() if name in names}
    again = [name for name in names if name in left or ended.get(name) == harness.INCOMPLETE]
    if again:
        longest = max(ROWS[name].minutes for name in again)
        print(f"{_counted(len(again), 'row')} left: {', '.join(again)}")
        print(f"    → run the same command again; the longest may take {longest:g} minutes")
    return FAILED if again or outcomes[harness.FAILED] else OK


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _wanted(given: argparse.Namespace) -> list[str]:
    """The rows to measure. ConfigError for arguments that are wrong."""
    names = given.only.split(",") if given.only else list(ROWS)
    problems = [
        Problem("command line", "--only", f"{name!r} is not a row", f"choose of {', '.join(ROWS)}")
        for name in names
        if name not in ROWS
    ]
    longest = max((ROWS[name].minutes for name in names if name in ROWS), default=0)
    if given.minutes is not None and given.minutes < longest:
        message = f"is {given.minutes:g}, and the longest of these rows may take {longest:g}"
        problems.append(Problem("command line", "--minutes", message, f"give at least {longest:g}"))
    if given.gpus is not None and given.gpus < 0:
        problems.append(Problem("command line", "--gpus", "is negative", "give 0 or more"))
    if problems:
        raise ConfigError(problems)
    return names
