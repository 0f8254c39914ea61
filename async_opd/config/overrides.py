"""Overrides on the command line: ``a.b.c=value``, alone or after ``--set``."""

from __future__ import annotations

import argparse

METAVAR = "a.b.c=value"


def add_overrides(
    parser: argparse.ArgumentParser, example: str = "train.steps=100", bare: bool = True
) -> None:
    """Adds ``--set``, and unless ``bare`` is false the positional overrides, to a subcommand.

    ``cli.main`` joins both in ``arguments.overrides``, those of ``--set`` last.
    """
    what = f"config keys to override, for example {example}"
    if bare:
        parser.add_argument("overrides", nargs="*", metavar=METAVAR, help=what)
    else:
        parser.set_defaults(overrides=[])
    what = "the same as an option, may be given several times" if bare else what
    parser.add_argument("--set", action="append", default=[], metavar=METAVAR, help=what)
