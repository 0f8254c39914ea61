"""``async_opd report`` and ``async_opd compare``: run directories in, one HTML file out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from async_opd.config.overrides import add_overrides

if TYPE_CHECKING:
    from async_opd.files.foreign import Place
    from async_opd.tools.report.recorded_run import RecordedRun


def add_report(parser: argparse.ArgumentParser) -> None:
    """Writes report.html into a run directory: one file that needs no network.

    It has a verdict on what limits the run, learning curves, staleness, the pools' time, the life
    of a sample, restarts, dead letters, the config and how to reproduce it. The run may be over or
    be running.

      async_opd report runs/quickstart
      async_opd report runs/quickstart report.gpu_hour_price=2.5 --out quickstart.html
    """
    parser.set_defaults(command=_report)
    parser.add_argument("run_dir", metavar="RUN_DIR|URL", help="directory of a run, or its mirror")
    add_overrides(parser, "report.gpu_hour_price=2.5")
    parser.add_argument(
        "--out", metavar="FILE", help="default: RUN_DIR/report.html (of a URL: report.html)"
    )
    what = "leave out the planner's prediction, which takes some seconds"
    parser.add_argument("--no-plan", action="store_true", help=what)


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Prints the figures of several runs and the config keys that differ.

    Writes compare.html with their curves over each other.

      async_opd compare runs/quickstart runs/lr6 --out compare.html
    """
    parser.set_defaults(command=_compare, overrides=[])
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR|URL", help="directories of runs")
    what = "default: compare.html in the working directory"
    parser.add_argument("--out", metavar="FILE", default="compare.html", help=what)


def _report(arguments: argparse.Namespace) -> int:
    from async_opd.checkpoint.run_copies import run_at
    from async_opd.config.paths import is_url

    with run_at(arguments.run_dir) as folder:
        beside = Path() if is_url(arguments.run_dir) else folder.root
        file = Path(arguments.out) if arguments.out else beside / "report.html"
        return _report_of(folder, file, arguments)


def _report_of(folder: Place, file: Path, arguments: argparse.Namespace) -> int:
    from async_opd.core.printable import on_one_line
    from async_opd.files.safe_open import write_atomically
    from async_opd.tools.report.forecast import NO_GAIN, forecast
    from async_opd.tools.report.recorded_run import read_recorded_run
    from async_opd.tools.report.run_report import report
    from async_opd.tools.report.verdict import judge

    run = read_recorded_run(folder, arguments.overrides)
    _print_left_out(run)
    verdict = judge(run)
    prediction = "" if arguments.no_plan else str(forecast(run, verdict))
    if prediction == NO_GAIN:
        verdict = replace(verdict, remedy="Nothing needs to change.")
    write_atomically(file, report(run, verdict, prediction), durable=False)
    for line in (verdict.headline, verdict.remedy, prediction, f"report      {file}"):
        if line:
            print(on_one_line(line))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from async_opd.checkpoint.run_copies import run_at
    from async_opd.core.printable import on_one_line
    from async_opd.files.safe_open import write_atomically
    from async_opd.tools.report.comparison import (
        comparison,
        differing_keys,
        figures_of,
        recommended,
    )
    from async_opd.tools.report.recorded_run import read_recorded_run

    with ExitStack() as fetched:
        places = arguments.run_dirs + arguments.overrides
        runs = [read_recorded_run(fetched.enter_context(run_at(one))) for one in places]
        for run in runs:
            _print_left_out(run)
        columns, (*figures, verdicts) = figures_of(runs)
        _print_table("figures", columns, figures)
        if keys := differing_keys(runs):
            _print_table("keys that differ", ("key", *columns[1:]), keys)
        for name, words in zip(columns[1:], verdicts[1:], strict=True):
            print(on_one_line(f"verdict     {name}: {words}"))
        if found := recommended(runs):
            print(on_one_line(found))
        write_atomically(Path(arguments.out), comparison(runs), durable=False)
    print(on_one_line(f"comparison  {arguments.out}"))
    return 0


def _print_left_out(run: RecordedRun) -> None:
    """Prints which parts of the run's config are left out."""
    from async_opd.core.printable import on_one_line
    from async_opd.tools.report.recorded_run import left_out

    for problem in run.left_out:
        print(on_one_line(left_out(problem)), file=sys.stderr)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from async_opd.core.printable import on_one_line
    from async_opd.observability.terminal import table_terminal

    table = Table(title=title)
    for name in columns:
        table.add_column(Text(on_one_line(name)))
    for row in rows:
        table.add_row(*(Text(on_one_line(cell)) for cell in row))
    table_terminal().print(table)
