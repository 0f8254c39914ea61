"""The arguments of ``async_opd dashboard``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from async_opd.core.printable import indented

ABOUT = """\
Saves a wandb workspace for the runs of a project: sections Learning, Staleness, Throughput,
Teachers, Weight sync and Health; docs/dashboards.md says what each panel shows. Without a login it
writes dashboard.json and prints the command that saves it.

  async_opd dashboard runs/quickstart
  async_opd dashboard config.yaml --entity my-team
"""


def add_arguments(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand's parser."""
    short = "save a wandb workspace for the runs of a project"
    parser = commands.add_parser("dashboard", help=short, description=ABOUT)
    parser.add_argument("path", metavar="RUN_DIR|CONFIG", help="run directory or YAML file")
    parser.add_argument("--entity", metavar="E", help="wandb user or team (default: your own)")
    parser.set_defaults(command=_dashboard)


def _dashboard(given: argparse.Namespace) -> int:
    from async_opd.config.load import load_config
    from async_opd.files.foreign import foreign
    from async_opd.observability.dashboard.workspace import save

    path = Path(given.path)
    of_run = path.is_dir()
    folder = path if of_run else Path()
    config = load_config(foreign(path) / "config.yaml" if of_run else path, recorded=of_run)
    print(indented(save(config, folder, given.entity, given.path)))
    return 0
