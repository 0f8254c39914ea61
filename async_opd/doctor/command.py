"""``async_opd doctor CONFIG``: would a run work here, and what would its models read?

Exit codes: 0 it could work, 2 it could not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from async_opd.core.errors import ConfigError
from async_opd.core.printable import escaped, indented

if TYPE_CHECKING:
    from async_opd.doctor.examination import Examination

ABOUT = """\
Examines what a run of a config would meet on this machine: versions, devices, vocabularies, chat
templates, prompts as the models read them, lengths, memory, network, disk, wandb. Each line is ok,
a warning or an error, with its remedy. Starts no engine and downloads nothing.

  async_opd doctor config.yaml
  async_opd doctor config.yaml --prompts 10 --json
"""
WORKS, COULD_NOT = 0, 2
SHOWN = 3


def add_arguments(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand's parser."""
    about = "examine what a run would meet here"
    parser = commands.add_parser("doctor", help=about, description=ABOUT)
    parser.add_argument("config", help="YAML file")
    what = "config keys to override, for example train.steps=100"
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value", help=what)
    what = f"training prompts to show (default {SHOWN})"
    parser.add_argument("--prompts", type=int, default=SHOWN, metavar="N", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.set_defaults(command=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    from async_opd.config.load import load_config
    from async_opd.config.secrets import Redactor
    from async_opd.doctor.environment import environment
    from async_opd.doctor.examination import Examination, examine, of_problem

    try:
        config = load_config(given.config, given.overrides)
    except ConfigError as error:
        problems = error.problems
        found = Examination()
        found.add("environment", environment)
        found.findings += [replace(of_problem(one), topic="config") for one in problems]
        found.sort()
    else:
        given.redacted = Redactor(config.model_dump(mode="json", by_alias=True))
        found = examine(config, given.config, max(given.prompts, 0))
    print(given.redacted(_document(found) if given.json else _text(found)))
    return WORKS if found.works else COULD_NOT


def _document(found: Examination) -> str:
    return json.dumps({"works": found.works} | asdict(found), indent=2, allow_nan=False)


def _text(found: Examination) -> str:
    """The lines, the prompts, and the number of errors and warnings."""
    lines = [indented(one.line) for one in found.findings]
    for prompt in found.prompts:
        head = f"{prompt.uid} ({prompt.data_source}) read by {prompt.reader}"
        lines += [
            "",
            escaped(f"prompt {head}, {prompt.tokens} tokens:"),
            indented(repr(prompt.text)),
        ]
    count = {
        name: sum(one.status == name for one in found.findings) for name in ("error", "warning")
    }
    could = "could work" if found.works else "could not work"
    said = f"a run {could} here: {count['error']} errors, {count['warning']} warnings"
    return "\n".join([*lines, "", said])
