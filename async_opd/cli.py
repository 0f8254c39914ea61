"""The ``async_opd`` command: its subcommands by name, loaded when called, and the exit codes."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from async_opd import __version__, other_system
from async_opd.config.overrides import add_config, add_run_dir, load_given
from async_opd.config.secrets import Redactor
from async_opd.core.errors import AsyncOPDError, ConfigError, Problem
from async_opd.core.printable import indented
from async_opd.models import torchvision_operators, unasked
from async_opd.processes.output import has_reader, write_stderr

OK, FAILED, BAD_INPUT, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
"""Exit codes. ``NO_READER`` is that of a process which SIGPIPE ends, as a shell reports it."""
EXIT_CODES = (
    "exit codes: 0 done, 1 failed, 2 bad config or usage, 130 interrupted, 141 output closed"
)
MOST_KEYS = 3
BUG = f""", which is a bug of async_opd {__version__}
    → report it with the lines above, the command and the config"""
PANIC = "PanicException"
"""The name of what a library in Rust raises for a bug in the library; it is not an Exception."""
ABOUT = """\
Trains a student model on its own rollouts, scored by one or more teachers: rollouts, scoring and
training run at the same time, on dedicated GPUs.

A run is one YAML file. Check it, try it on this machine, then start it; a run of some steps has the
speeds by which the next one is planned:

  async_opd check  config.yaml
  async_opd doctor config.yaml
  async_opd run    config.yaml --run-dir runs/first
  async_opd plan   runs/first --gpus 8
"""
FIRST_STEPS, REPORT = "tools.first_steps.command", "tools.report.command"
GROUPS = {
    "start": {
        "quickstart": (FIRST_STEPS, "train a first run, on models and data that come along"),
        "init": (FIRST_STEPS, "write a first config"),
        "import": ("tools.importing.command", "turn a run of verl, TRL, prime-rl … into a config"),
        "completion": (FIRST_STEPS, "print a shell's completion script"),
    },
    "before": {
        "check": ("tools.check", "check a config and its inputs; starts nothing"),
        "doctor": ("tools.doctor.command", "examine what a run would meet here"),
        "qualify": (
            "tools.qualify.command",
            "measure the parts without proof on this machine's GPUs",
        ),
        "probe": ("tools.probe.command", "measure whether the teachers will teach the student"),
        "plan": ("tools.plan.command", "predict throughput and staleness, advise sizes"),
    },
    "run": {
        "run": ("cli", "train the student of a config"),
        "watch": ("tools.watch", "show a run that runs elsewhere"),
    },
    "after": {
        "report": (REPORT, "write report.html of a run"),
        "compare": (REPORT, "compare several runs"),
        "eval": ("tools.evaluate", "evaluate a model alone"),
        "export": ("tools.export", "write a trained student"),
    },
    "deeper": {
        "inspect": ("tools.inspecting.command", "show the tokens of a sample"),
        "replay": ("tools.replay.command", "compute a step again"),
        "dashboard": ("tools.dashboard", "save a wandb workspace for the runs of a project"),
    },
}
"""Each command's module, and its line in the help.

The function ``add_NAME`` of the module adds the command's arguments to its parser, and has the
command's help as its docstring.
The groups and their commands are in the order of use.
"""
COMMANDS = {name: added for group in GROUPS.values() for name, added in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. An error that is not expected is shown, not raised."""
    if why := other_system():
        print(why, file=sys.stderr)
        return BAD_INPUT
    torchvision_operators.install()
    unasked.never_ask()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # such as → where the encoding is ascii
    words = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions (async_opd completion)
        import argcomplete

        argcomplete.autocomplete(parser())
    try:
        try:
            return _exit_code(_parsed(words))
        finally:
            if sys.stdout is not None:  # as where the shell has closed it
                sys.stdout.flush()
    except OSError as error:  # of standard output, which Python would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return NO_READER
        write_stderr(f"failed: {error}: is standard output full or closed?")
        return FAILED


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments with all overrides; argparse ends the process for those that are wrong."""
    known = parser(next((word for word in words if word in COMMANDS), ""))
    near = [] if not words or words[0] in COMMANDS else get_close_matches(words[0], COMMANDS, n=1)
    if near:
        known.error(Redactor()(f"no command {words[0]}: did you mean {near[0]}?"))
    arguments, rest = known.parse_known_args(words)
    for text in rest:  # argparse leaves over the overrides that follow an option
        if text.startswith("-") or "overrides" not in arguments:
            usage = arguments.parser.format_usage()
            hint = _as_override(text, usage) if "overrides" in arguments else ""
            arguments.parser.error(Redactor()(f"unrecognized arguments: {text}{hint}"))
    if "overrides" in arguments:
        arguments.overrides = [*arguments.overrides, *rest, *getattr(arguments, "set", [])]
    arguments.redacted = Redactor()
    return arguments


def _as_override(option: str, usage: str) -> str:
    """The config keys that an unknown option may mean: ``--steps`` is ``--set train.steps=…``.

    A model has an option of the command, if its usage has one of the section's name.
    """
    from async_opd.config.keys import all_keys

    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    meant = list[str]()
    for key in all_keys():
        if f".{key}".endswith(f".{name}"):
            own = f"--{key.partition('.')[0].removesuffix('s')}"
            is_own = name == "model" and f"[{own} " in usage
            meant.append(own if is_own else f"--set {key}=…")
    shown = " or ".join([*dict.fromkeys(meant)][:MOST_KEYS])
    return f" (did you mean {shown}?)" if shown else ""


def _exit_code(arguments: argparse.Namespace) -> int:
    """Runs a command. OSError if standard output cannot be written any more."""
    try:
        return int(arguments.command(arguments))
    except ConfigError as error:
        write_stderr(indented(arguments.redacted(str(error))))
        return BAD_INPUT
    except (AsyncOPDError, OSError) as error:  # raised before the run had opened its run.log
        if isinstance(error, BrokenPipeError) and not has_reader(sys.stdout):
            raise
        write_stderr(indented(arguments.redacted(f"failed: {error}")))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:  # libraries quote their input: secrets, a terminal's commands
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        write_stderr(indented(arguments.redacted(traceback.format_exc())))
        write_stderr(f"failed: {type(error).__name__}{BUG}")
        return FAILED


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and lists commands by their groups."""

    def add_argument(self, action: argparse.Action) -> None:
        """Adds an argument; the one that names the command as a section for each group."""
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)
            return
        listed = {one.dest: one for one in action._get_subactions()}
        for title, group in GROUPS.items():
            self.start_section(title)
            for name in group:
                super().add_argument(listed[name])
            self.end_section()


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends with EXIT_CODES."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Help, epilog=EXIT_CODES)


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; with ``command`` only that one's arguments are loaded."""
    root = _Parser(prog="async_opd", description=ABOUT)
    root.add_argument("--version", action="version", version=f"async_opd {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, (module, about) in COMMANDS.items():
        sub = commands.add_parser(name, help=about)
        sub.set_defaults(parser=sub)
        if command in (None, name):
            add = _loaded(f"{module}:add_{name}")
            sub.description = inspect.getdoc(add)
            add(sub)
    return root


def _loaded(place: str) -> Any:
    """The function ``module:name`` of this package. Nothing imports tools but by this."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"async_opd.{module}"), name)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Starts the engines, trains all steps, and writes the student into the run directory.

    Metrics and checkpoints are there, too: in runs/NAME-DATE unless --run-dir or the config names
    another one. The first SIGINT or SIGTERM ends the run with a checkpoint, a second SIGINT ends it
    at once.

      async_opd run config.yaml
      async_opd run config.yaml train.lr=1e-6 --run-dir runs/lr6
      async_opd run config.yaml train.lr=1e-6 --run-dir runs/lr6 --resume
    """
    add_config(parser)
    add_run_dir(parser)
    what = "continue the run in --run-dir after its newest checkpoint"
    parser.add_argument("--resume", action="store_true", help=what)
    what = "check everything that the run needs, without writing or starting anything"
    parser.add_argument("--dry-run", action="store_true", help=what)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from async_opd.prepare import prepare

    config = load_given(arguments)
    if arguments.resume and config.run_dir is None:
        message, remedy = "--resume needs the directory of the run", "add --run-dir D"
        raise ConfigError([Problem("command line", "run_dir", message, remedy)])
    if arguments.dry_run:
        dry_run = _loaded("tools.dry_run:dry_run")
        dry_run(config, arguments.config, arguments.redacted, arguments.resume)
        return OK
    ready = prepare(config, arguments.config, resume=arguments.resume)
    from async_opd.run import run

    return run(ready, arguments.resume)
