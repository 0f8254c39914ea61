"""``async_opd import``: a script or config of another framework in, a config of ours out."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

IMPORT = """\
Turns a run of another framework into a config: verl (.sh with Hydra overrides, .yaml), TRL (.py
with a config class, .sh with flags, .yaml), prime-rl (.toml), AsyncOPD (.yaml), NeMo-RL (.yaml).
Files are parsed, never executed. Comments name every key of the file: what it became here, why it
means nothing here, or that it is not mapped.

  async_opd import run_qwen3_8b_fsdp.sh > config.yaml
  async_opd import rl.toml --output config.yaml
"""
NAMES = ("verl", "nemo-rl", "asyncopd", "prime-rl", "trl")
OK, BAD_INPUT = 0, 2


def add_import(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``async_opd import``."""
    parser.description = IMPORT
    parser.set_defaults(command=_import)
    parser.add_argument("file", metavar="FILE", help="script or config of the other framework")
    what = "the framework (default: the one whose keys the file has)"
    parser.add_argument("--from", dest="framework", choices=NAMES, help=what)
    parser.add_argument("--output", metavar="FILE", help="default: standard output")
    parser.add_argument("--force", action="store_true", help="replace an existing --output")


def _import(arguments: argparse.Namespace) -> int:
    """Writes the config; exit code 2 if it does not pass the check of its keys yet."""
    from async_opd.core.errors import ConfigError, Problem
    from async_opd.core.printable import on_one_line
    from async_opd.files.safe_open import write_atomically

    target = None if arguments.output is None else Path(arguments.output)
    if target is not None and target.exists() and not arguments.force:
        problem = Problem(str(target), "", "exists already", "add --force, or name another file")
        raise ConfigError([problem])
    text = arguments.redacted(imported(Path(arguments.file), arguments.framework))
    if target is None:
        sys.stdout.write(text)
    else:
        write_atomically(target, text)
        print(on_one_line(f"wrote {target}; check it: async_opd check {target}"))
    check_keys(text)
    return OK


def imported(path: Path, name: str | None = None) -> str:
    """The text of the config that the file becomes. ConfigError if the file cannot be read."""
    from async_opd.tools.importing.common import finish
    from async_opd.tools.importing.draft import Draft
    from async_opd.tools.importing.frameworks import framework_of, parse
    from async_opd.tools.importing.written import written

    parsed = parse(path)
    framework = framework_of(path, parsed.keys, name)
    draft = Draft(parsed.keys)
    draft.apply(framework.table)
    framework.together(draft)
    draft.finish(framework.table)
    finish(draft)
    files = ", ".join([path.name, *parsed.parents])
    return written(draft, files, framework.name, parsed.notes)


def check_keys(text: str) -> None:
    """ConfigError if the config does not load; files and models that it names are not looked at.

    Neither are the variables of the environment in their paths, which may be another machine's.
    """
    from async_opd.config.load import load_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(re.sub(r"\$\{(\w+)\}", r"\1", text))
        load_config(file)
