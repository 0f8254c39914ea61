"""The arguments of ``async_opd watch``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

WAIT_S = 60.0
ABOUT = """\
Shows a run in this terminal while it runs in another one, and how it ended. Reads the run directory
and writes nothing. Ctrl-C ends the view, not the run. Exit code 1: the run's process is gone.

  async_opd watch runs/quickstart
"""


def add_arguments(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand's parser."""
    parser = commands.add_parser("watch", help="show a run that runs elsewhere", description=ABOUT)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run")
    what = f"seconds to wait for a run that has not begun yet (default: {WAIT_S:g})"
    parser.add_argument("--wait", type=float, default=WAIT_S, metavar="S", help=what)
    parser.set_defaults(command=_watch)


def _watch(given: argparse.Namespace) -> int:
    from async_opd.live_view.watch import watch

    return watch(Path(given.run_dir), given.wait)
