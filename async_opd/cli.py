"""The ``async_opd`` command: its subcommands, their options, help and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from async_opd import __version__, evaluate, export
from async_opd.config.overrides import add_overrides
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.errors import AsyncOPDError, ConfigError, Problem
from async_opd.core.printable import indented
from async_opd.doctor import command as doctor
from async_opd.first_steps import command as first_steps
from async_opd.importing import command as importing
from async_opd.inspecting import command as inspecting
from async_opd.live_view import command as watch
from async_opd.models import torchvision_operators
from async_opd.observability.dashboard import command as dashboard
from async_opd.probe import command as probe
from async_opd.processes.output import write_stderr
from async_opd.replay import command as replay
from async_opd.report import command as report

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = "exit codes: 0 done, 1 failed, 2 bad config or usage, 130 interrupted by a signal"
BUG = f""", which is a bug of async_opd {__version__}
    → report it with the lines above, the command and the config"""
ABOUT = """\
Trains a student model on its own rollouts, scored by one or more teachers: rollouts, scoring and
training run at the same time, on GPUs of their own.

A run is one YAML file. Check it, plan it, then start it:

  async_opd check config.yaml
  async_opd plan  config.yaml --gpus 8
  async_opd run   config.yaml
"""
RUN = """\
Starts the engines, trains all steps, and writes the student, metrics and checkpoints into the run
directory (runs/NAME-DATE unless --run-dir or the config names one). The first SIGINT or SIGTERM
ends the run with a checkpoint, a second SIGINT ends it at once.

  async_opd run config.yaml
  async_opd run config.yaml train.lr=1e-6 --run-dir runs/lr6
  async_opd run config.yaml --run-dir runs/lr6 --resume
"""
CHECK = """\
Checks config, models, tokenizers, data and endpoints without starting an engine. Prints the config
with all defaults, the pools with their GPUs, and the bytes that samples take; or every problem that
it finds, each with a remedy. Looks for the files of code that the config names; without --load it
runs none of it, and sends no key.

  async_opd check config.yaml rollout.replicas=4
  async_opd check config.yaml --load
"""
PLAN = """\
Predicts throughput and staleness, and advises how many GPUs each pool should have and which
staleness threshold is enough. The speeds come from the config's plan section, or from a finished
run. Draws a chart into plan.svg.

  async_opd plan config.yaml --gpus 64
  async_opd plan runs/quickstart rollout.n=8 --json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. An error that is not expected is shown, not raised."""
    torchvision_operators.install()
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions (async_opd completion)
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, rest = parser.parse_known_args(argv)
    for text in rest:  # argparse leaves over the overrides that follow an option
        if text.startswith("-") or "overrides" not in arguments:
            parser.error(Redactor()(f"unrecognized arguments: {text}"))
    if "overrides" in arguments:
        arguments.overrides = [*arguments.overrides, *rest, *getattr(arguments, "set", [])]
    arguments.redacted = Redactor()
    try:
        return int(arguments.command(arguments))
    except ConfigError as error:
        write_stderr(indented(arguments.redacted(str(error))))
        return BAD_INPUT
    except (AsyncOPDError, OSError) as error:  # raised before the run had opened its run.log
        write_stderr(indented(arguments.redacted(f"failed: {error}")))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # libraries quote their input: secrets, and a terminal's commands
        write_stderr(indented(arguments.redacted(traceback.format_exc())))
        write_stderr(f"failed: {type(error).__name__}{BUG}")
        return FAILED


class _Parser(argparse.ArgumentParser):
    """A parser whose help keeps the line breaks of its description, and ends with EXIT_CODES."""

    def __init__(self, **options: Any) -> None:
        shown = argparse.RawDescriptionHelpFormatter
        super().__init__(**options, formatter_class=shown, epilog=EXIT_CODES)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="async_opd", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"async_opd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, short, about in (
        ("run", _run, "train the student of a config", RUN),
        ("check", _check, "check a config and its inputs without starting anything", CHECK),
        ("plan", _plan, "predict throughput and staleness, advise sizes", PLAN),
    ):
        sub = commands.add_parser(name, help=short, description=about)
        sub.set_defaults(command=command)
        given = (
            "YAML file with a plan section, or a run directory" if name == "plan" else "YAML file"
        )
        sub.add_argument("config", help=given)
        add_overrides(sub)
        what = "async.staleness_threshold: how far rollouts may run ahead of training, in versions"
        sub.add_argument("--staleness-threshold", metavar="F", help=what)
        what = "async.sync_steps: optimizer steps between two weight syncs"
        sub.add_argument("--sync-steps", metavar="N", help=what)
    first_steps.add_arguments(commands, _run)
    doctor.add_arguments(commands)
    probe.add_arguments(commands)
    watch.add_arguments(commands)
    report.add_arguments(commands)
    inspecting.add_arguments(commands)
    dashboard.add_arguments(commands)
    evaluate.add_arguments(commands)
    export.add_arguments(commands)
    importing.add_arguments(commands)
    replay.add_arguments(commands)
    for name in ("run", "check"):
        what = "run_dir: the directory for checkpoints, metrics and the trained student"
        commands.choices[name].add_argument("--run-dir", metavar="D", help=what)
    what = "run the code that the config names (loss, graders, sources, loggers, transport), too, "
    what += "and send servers of teachers their keys"
    commands.choices["check"].add_argument("--load", action="store_true", help=what)
    what = "continue the run in --run-dir after its newest checkpoint"
    commands.choices["run"].add_argument("--resume", action="store_true", help=what)
    what = "check everything that the run needs, without writing or starting anything"
    commands.choices["run"].add_argument("--dry-run", action="store_true", help=what)
    plan = commands.choices["plan"]
    what = "GPUs to split among the pools (default: as many as the config uses)"
    plan.add_argument("--gpus", type=int, metavar="N", help=what)
    what = "directory for plan.svg (default: runs/, or the run directory)"
    plan.add_argument("--out", metavar="DIR", help=what)
    plan.add_argument("--json", action="store_true", help="print one JSON document instead")
    return parser


def _load(arguments: argparse.Namespace) -> RunConfig:
    from async_opd.config.load import load_config

    config = load_config(arguments.config, _overrides(arguments))
    arguments.redacted = Redactor(config.model_dump(mode="json", by_alias=True))
    return config


def _overrides(arguments: argparse.Namespace) -> list[str]:
    run_dir = getattr(arguments, "run_dir", None)
    flags = {
        "async.staleness_threshold": arguments.staleness_threshold,
        "async.sync_steps": arguments.sync_steps,
        "run_dir": run_dir and json.dumps(run_dir),
    }
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    return [*arguments.overrides, *given]


def _check(arguments: argparse.Namespace) -> int:
    from async_opd.check import check

    check(_load(arguments), arguments.config, arguments.redacted, arguments.load)
    return OK


def _plan(arguments: argparse.Namespace) -> int:
    from async_opd.plan.command import plan

    plan(
        arguments.config,
        _overrides(arguments),
        gpus=arguments.gpus,
        out=arguments.out,
        as_json=arguments.json,
    )
    return OK


def _run(arguments: argparse.Namespace) -> int:
    from async_opd.api import prepared

    config = _load(arguments)
    if arguments.resume and config.run_dir is None:
        message, remedy = "--resume needs the directory of the run", "add --run-dir D"
        raise ConfigError([Problem("command line", "run_dir", message, remedy)])
    if arguments.dry_run:
        from async_opd.check import dry_run

        dry_run(config, arguments.config, arguments.redacted, arguments.resume)
        return OK
    config, inputs = prepared(config, arguments.config, arguments.resume)
    from async_opd.run import run

    return run(config, inputs, arguments.resume)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, which python -m puts there
    sys.exit(main())
