"""A config on the command line: its file, overrides (``a.b.c=value``), flags; their completion."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig

METAVAR = "a.b.c=value"


TRUST = "--trust-remote-code"


def add_trust(parser: argparse.ArgumentParser, whose: str) -> None:
    """Adds the flag of a command that is given somebody else's run directory or model."""
    what = f"run the code that {whose}, as you: only after you have read it"
    parser.add_argument(TRUST, action="store_true", help=what)


def add_config(parser: argparse.ArgumentParser, given: str = "YAML file") -> None:
    """Adds a config, its overrides, and flags for the keys that are tuned most."""
    parser.add_argument("config", help=given)
    add_overrides(parser)
    what = "async.staleness_threshold: how far rollouts may run ahead of training, in versions"
    parser.add_argument("--staleness-threshold", metavar="F", help=what)
    what = "async.sync_steps: optimizer steps between two weight syncs"
    parser.add_argument("--sync-steps", metavar="N", help=what)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for the run's directory."""
    what = "run_dir: the directory for checkpoints, metrics and the trained student"
    parser.add_argument("--run-dir", metavar="D", help=what)


def load_given(given: argparse.Namespace) -> RunConfig:
    """The config of a command with its overrides; ``given.redacted`` hides its secrets then.

    ConfigError with all problems.
    """
    from async_opd.config.load import load_config
    from async_opd.config.secrets import Redactor

    config = load_config(given.config, all_overrides(given))
    given.redacted = Redactor(config.model_dump(mode="json", by_alias=True))
    return config


def all_overrides(given: argparse.Namespace) -> list[str]:
    """The overrides of a command, then its flags as overrides."""
    run_dir = getattr(given, "run_dir", None)
    flags = {
        "async.staleness_threshold": getattr(given, "staleness_threshold", None),
        "async.sync_steps": getattr(given, "sync_steps", None),
        "run_dir": run_dir and json.dumps(run_dir),
    }
    named = [f"{key}={value}" for key, value in flags.items() if value is not None]
    return [*given.overrides, *named]


def add_overrides(
    parser: argparse.ArgumentParser, example: str = "train.steps=100", bare: bool = True
) -> None:
    """Adds ``--set``, and unless ``bare`` is false the positional overrides, to a subcommand.

    ``cli.main`` joins both in ``arguments.overrides``, those of ``--set`` last.
    """
    what = f"config keys to override, for example {example}"
    if bare:
        alone = parser.add_argument("overrides", nargs="*", default=[], metavar=METAVAR, help=what)
        alone.completer = completions  # type: ignore[attr-defined]
        what = "the same as an option, may be given several times"
    else:
        parser.set_defaults(overrides=[])
    named = parser.add_argument("--set", action="append", default=[], metavar=METAVAR, help=what)
    named.completer = completions  # type: ignore[attr-defined]


def completions(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The keys of an override that begins with ``prefix``, down to the next dot.

    argcomplete calls it. Names of teachers are those of the config that is given, if it can be
    read.
    """
    from async_opd.config.keys import all_keys

    names = _teachers(getattr(parsed_args, "config", None))
    keys = list(_named(all_keys(), names))
    while True:
        found = _next_parts(prefix, keys)
        # The shell would put a space behind a single completion, unless it ends with "=".
        if len(found) != 1 or not found[0].endswith("."):
            return found
        (prefix,) = found


def _next_parts(prefix: str, keys: list[str]) -> list[str]:
    """Keys that begin with the prefix: whole ones with ``=``, of longer ones a part, with ``.``."""
    depth, found = prefix.count(".") + 1, dict[str, bool]()
    for key in keys:
        if key.startswith(prefix):
            parts = key.split(".")
            part = ".".join(parts[:depth])
            found[part] = found.get(part, False) or len(parts) > depth
    return [part + ("." if has_keys else "=") for part, has_keys in found.items()]


def _named(keys: Iterable[str], names: list[str]) -> Iterable[str]:
    for key in keys:
        if "<name>" in key:
            yield from (key.replace("<name>", name) for name in names)
        else:
            yield key


def _teachers(config: str | None) -> list[str]:
    """The teachers' names in a config, if a shell can show them; none if it cannot be read."""
    from async_opd.config.load import MAX_CONFIG_BYTES
    from async_opd.config.yaml_text import YamlError, load_yaml

    def opener(path: str, flags: int) -> int:  # a pipe would make the shell wait
        return os.open(path, flags | os.O_NONBLOCK)

    try:
        with open(str(config), "rb", opener=opener) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_CONFIG_BYTES + 1) if is_regular else b""
        if len(content) > MAX_CONFIG_BYTES:
            return []
        names = map(str, load_yaml(content.decode())["teachers"])
        return [name for name in names if name.isprintable()]
    except (OSError, ValueError, LookupError, TypeError, YamlError):
        return []
