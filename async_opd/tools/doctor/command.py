"""``async_opd doctor CONFIG``: would a run work here, and what would its models read?

Exit codes: 0 it could work, 2 it could not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from async_opd.config.overrides import add_overrides, load_given
from async_opd.core.errors import ConfigError
from async_opd.core.printable import indented, on_one_line
from async_opd.processes.output import write_stderr
from async_opd.tools.doctor.finding import Finding

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.tools.doctor.examination import Examination
    from async_opd.tools.doctor.prompts import RenderedPrompt

WORKS, COULD_NOT = 0, 2
SHOWN = 3


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Examines what a run of a config would meet on this machine.

    Its topics are versions, devices, vocabularies, chat templates, prompts as the models read them,
    lengths, memory, network, disk and wandb. Each line is ok, a warning or an error, with its
    remedy. Starts no engine and downloads nothing, unless --engines is given: then it starts all
    pools, measures how far trainer, rollout and scoring engines are apart, and the replicas of each
    teacher, and pushes one update through every replica.

      async_opd doctor config.yaml
      async_opd doctor config.yaml --prompts 10 --json
      async_opd doctor config.yaml --engines
    """
    parser.add_argument("config", help="YAML file")
    add_overrides(parser)
    what = f"training prompts to show (default {SHOWN})"
    parser.add_argument("--prompts", type=int, default=SHOWN, metavar="N", help=what)
    what = "also start the engines, measure how far they are apart, and push one update"
    parser.add_argument("--engines", action="store_true", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.set_defaults(command=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    from async_opd.tools.doctor.environment import environment
    from async_opd.tools.doctor.examination import Examination, examine, of_problem

    shown = 0
    try:
        config = load_given(given)
    except ConfigError as error:
        problems = error.problems
        found = Examination()
        found.add("environment", environment)
        found.findings += [replace(of_problem(one), topic="config") for one in problems]
        found.sort()
    else:
        found = examine(config, given.config, max(given.prompts, 0))
        if given.engines:
            early = "" if given.json else _lines(found.findings, found.prompts)
            print(given.redacted(early), end="", flush=True)  # engines take minutes
            shown = 0 if given.json else len(found.findings)
            _start(config, given.config, found, given.redacted)
    prompts = [] if shown else found.prompts
    rest = _lines(found.findings[shown:], prompts) + _summary(found)
    print(_document(found, given.redacted) if given.json else given.redacted(rest))
    return WORKS if found.works else COULD_NOT


def _start(
    config: RunConfig, where: str, found: Examination, redacted: Callable[[str], str]
) -> None:
    """Adds what the engines show, unless a run could not start them."""
    from async_opd.tools.doctor.engines import run_engines

    shown = {one.found for one in found.findings}

    def say(text: str) -> None:
        if text not in shown:
            write_stderr(indented(redacted(text)))

    if found.works:
        found.add("engines", lambda: run_engines(config, where, say))
    else:
        message = "not started: the errors above come first"
        found.findings.append(Finding("engines", "warning", message, "mend them, then try again"))


def _document(found: Examination, redacted: Callable[[str], str]) -> str:
    """JSON, whose texts are redacted before they are escaped: a secret may have a quote in it."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [shown(one) for one in value]
        return redacted(value) if isinstance(value, str) else value

    document = {"works": found.works} | shown(asdict(found))
    return json.dumps(document, indent=2, allow_nan=False)


def _lines(findings: Sequence[Finding], prompts: Sequence[RenderedPrompt]) -> str:
    """The findings, and the prompts below them; every line ends."""
    lines = [indented(one.line) for one in findings]
    for one in prompts:
        head = f"{one.uid} ({one.data_source}) read by {one.reader}, {one.tokens} tokens:"
        lines += ["", on_one_line(f"prompt {head}"), indented(repr(one.text))]
    return "".join(f"{line}\n" for line in lines)


def _summary(found: Examination) -> str:
    """Whether the run could work, with the number of errors and warnings."""
    has = [one.status for one in found.findings]
    could = "could work" if found.works else "could not work"
    counts = {name: has.count(name) for name in ("error", "warning")}
    counted = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())
    return f"\na run {could} here: {counted}"
