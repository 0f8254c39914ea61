"""``async_opd init``, ``quickstart`` and ``completion``: their options, and what they do."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_opd.config.overrides import add_overrides
from async_opd.config.secrets import without_secrets
from async_opd.core.errors import ConfigError
from async_opd.core.printable import indented, on_one_line
from async_opd.files.foreign import foreign
from async_opd.files.safe_open import refuse_link, remove_tree

SHELLS = ("bash", "zsh", "fish")
OK = 0


NAME = "quickstart"
CONFIG, INPUTS = f"{NAME}.yaml", (f"{NAME}/models", f"{NAME}/data")


def packaged() -> Path:
    """The folder with the config and its inputs. ConfigError if the installation lacks them."""
    here = Path(__file__).resolve()
    places = (here.parents[2] / "examples", here.parents[3] / "examples")
    found = next((place for place in places if (place / CONFIG).is_file()), None)
    if found is None:
        message = f"the quickstart's {CONFIG} is in none of {', '.join(map(str, places))}"
        remedy = "install async_opd from its wheel, or run in a complete checkout"
        raise ConfigError.of("", message, remedy, "installation")
    return found


def refuse_folder(folder: Path) -> None:
    """ConfigError for a file, and for a folder with inputs and without their config."""
    if folder.exists() and not folder.is_dir():
        message, remedy = f"{folder} is not a directory", "name another one"
    elif not folder.exists() and "=" in folder.name:
        message, remedy = f"{folder} is taken for DIR", f"for a key of the config: --set {folder}"
    elif (folder / NAME).exists() and not (folder / CONFIG).exists():
        message = f"{folder / NAME} exists, but {CONFIG} beside it does not"
        remedy = f"remove {folder / NAME}, or name another directory: async_opd quickstart DIR"
    else:
        return
    raise ConfigError.of("DIR", message, remedy)


def refuse_unnamed(config: Path) -> None:
    """ConfigError for a config that this command did not write: it may run code of others."""
    try:
        found = (foreign(config.parent) / config.name).read()
    except FileNotFoundError:
        return
    except OSError:  # a link or a pipe, which this command does not write either
        found = b""
    if found != (packaged() / CONFIG).read_bytes():
        message = f"{config.name} is here already, and is not the one of this version"
        remedy = "if it is yours, name its directory: async_opd quickstart ."
        raise ConfigError.of("DIR", message, remedy)


def copy_to(folder: Path) -> list[Path]:
    """Copies what is not in the folder yet, the config last; returns what was written.

    ConfigError where ``refuse_folder`` raises it.
    """
    refuse_folder(folder)
    if (folder / CONFIG).exists():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    source, partial = packaged(), folder / f".{NAME}.partial"
    for name in (CONFIG, NAME):
        refuse_link(folder / name)
    remove_tree(partial)  # of a copy that was interrupted
    partial.mkdir()
    for name in INPUTS:
        to = partial / Path(name).name
        shutil.copytree(source / name, to, copy_function=shutil.copyfile)
    partial.rename(folder / NAME)
    shutil.copyfile(source / CONFIG, folder / CONFIG)
    return [folder / CONFIG, folder / NAME]


def add_init(parser: argparse.ArgumentParser) -> None:
    r"""Writes a commented config of a student, its teachers and their prompts.

    It is written after the checks of async_opd check. Asks for what is not given, on a terminal.
    Paths are those of the working directory; the file names them relative to itself.

      async_opd init
      async_opd init my-run.yaml --student models/student --teacher models/teacher \
          --data train.jsonl --eval test.jsonl --set rollout.max_tokens=512
      async_opd init two.yaml --student models/student --teacher math=Qwen/Qwen3-8B \
          --teacher code=models/coder --data math=hf:openai/gsm8k:main:train \
          --data python:code=py.jsonl
    """
    parser.set_defaults(command=_init)
    what = "the config (default: config.yaml)"
    parser.add_argument("file", nargs="?", default="config.yaml", metavar="FILE", help=what)
    parser.add_argument("--student", metavar="MODEL", help="directory or hub id of the student")
    what = "directory or hub id of a teacher; with several each has a name"
    parser.add_argument("--teacher", action="append", default=[], metavar="[NAME=]MODEL", help=what)
    form = "[SOURCE[:TEACHER]=]PATH"
    what = (
        "prompts to train on: a file, a directory or hf:ID[:CONFIG][:SPLIT]. SOURCE is the data "
        "source of all its rows, which TEACHER scores (default: the teacher of that name)"
    )
    parser.add_argument("--data", action="append", default=[], metavar=form, help=what)
    what = "the same for prompts to evaluate on, with answers"
    parser.add_argument("--eval", action="append", default=[], metavar=form, help=what)
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    add_overrides(parser, bare=False)


def add_quickstart(parser: argparse.ArgumentParser) -> None:
    """Distils two small teachers into one student on two CPU cores, in about four minutes.

    It is the real pipeline, on models and data that come with async_opd. DIR then has
    quickstart.yaml and its inputs, to read and to change: existing files are kept. A
    quickstart.yaml that was changed is run where DIR is named. On a machine with fewer GPUs than
    its four pools take, they share them, in turns.

      async_opd quickstart
      async_opd quickstart first --set train.steps=50
      async_opd quickstart .
    """
    parser.set_defaults(command=_quickstart)
    what = "directory for the config, its inputs and runs (default: this one)"
    parser.add_argument("folder", nargs="?", metavar="DIR", help=what)
    what = "check everything that a run needs, without writing or starting anything"
    parser.add_argument("--dry-run", action="store_true", help=what)
    add_overrides(parser, bare=False)


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Prints the script that makes a shell complete commands, options, files and config keys.

    A shell runs it at its start:

      eval "$(async_opd completion bash)"                       in ~/.bashrc; the same with zsh
      async_opd completion fish > ~/.config/fish/completions/async_opd.fish
    """
    parser.set_defaults(command=_completion)
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))


def _init(given: argparse.Namespace) -> int:
    from async_opd.files.safe_open import write_atomically
    from async_opd.tools.first_steps.draft import Draft

    target = Path(given.file)
    if target.exists() and not given.force:
        raise ConfigError.of("", "exists already", "add --force, or name another file", str(target))
    if "=" in target.name and not target.exists():
        remedy = f"for a key of the config: --set {target}"
        raise ConfigError.of("FILE", f"{target} is taken for it", remedy)
    if not target.parent.is_dir():
        raise ConfigError.of("", "has no directory yet", f"mkdir -p {target.parent}", str(target))
    draft = Draft(given.student, given.teacher, given.data, given.eval)
    if sys.stdin.isatty() and sys.stdout.isatty():
        draft.ask(_asked)
    try:
        text, notes = checked_text(draft, target, given.overrides)
    except ConfigError as error:
        problems = [replace(one, remedy=as_options(one.remedy)) for one in error.problems]
        shown = (without_secrets(dict([one.partition("=")[::2]])) for one in given.overrides)
        overrides = (f"--set={key}={value}" for one in shown for key, value in one.items())
        words = [str(target), *draft.words(), *overrides]
        again = f"the command, to which the remedies add: async_opd init {shlex.join(words)}"
        raise ConfigError(problems, again) from error
    write_atomically(target, text)
    for note in notes:
        print(indented(given.redacted(f"note: {note}")))
    print(on_one_line(f"wrote {target}; next: async_opd doctor {target}, async_opd run {target}"))
    return OK


def as_options(remedy: str) -> str:
    """A remedy in terms of a config, in those of the command."""
    remedy = remedy.replace("data.train: {path: …, data_source: NAME}", "--data NAME=PATH")
    shared = r"('[^']*\.(?:placement|with)=\w+'|\b\S+\.(?:placement|with)=\w+)"
    remedy = re.sub(shared, r"--set \1", remedy)
    return re.sub(r"\bset ([a-z_.]+): (\w+)", r"add --set \1=\2", remedy)


def checked_text(draft: Any, target: Path, overrides: list[str]) -> tuple[str, list[str]]:
    """The text of the config, which passes the checks of ``async_opd check``, and their notes.

    ConfigError with all problems.
    """
    from async_opd.config.load import load_config, with_overrides
    from async_opd.config.yaml_text import load_yaml
    from async_opd.prepare import prepare
    from async_opd.tools.first_steps.draft import completed, config_text

    folder = target.resolve().parent
    tree = with_overrides(draft.tree(target.stem, folder), overrides)
    text = config_text(completed(tree), str(target))
    config = load_config(load_yaml(text), folder=folder)
    return text, prepare(config, str(target), fetch=False, load=False).inputs.notes


def _asked(question: str, default: str) -> str:
    from rich.prompt import Prompt
    from rich.text import Text

    try:
        return Prompt.ask(Text(on_one_line(question)), default=default, show_default=False).strip()
    except EOFError:  # Ctrl-D ends a list as an empty line does
        return default


def _quickstart(given: argparse.Namespace) -> int:
    from async_opd.cli import main

    folder = Path(given.folder or ".")
    config = folder / CONFIG
    if given.folder is None:  # the working directory may be a downloaded one
        refuse_unnamed(config)
    if config.exists():
        print(on_one_line(f"runs {config}, which is there already"), flush=True)
    if given.dry_run:
        refuse_folder(folder)
        config = config if config.exists() else packaged() / CONFIG
    else:
        for path in copy_to(folder):
            print(on_one_line(f"wrote {path}"), flush=True)  # before the run's own lines
    run_dir = folder / "runs" / f"{NAME}-{time.strftime('%Y%m%d-%H%M%S')}"
    words = ["run", str(config.absolute()), f"--run-dir={run_dir}"]
    if shared := shared_gpus(config, given.overrides):
        print(on_one_line(f"pools share GPUs, in turns: {shlex.join(shared)}"), flush=True)
    words += [f"--set={text}" for text in (*shared, *given.overrides)]
    return main([*words, "--dry-run"] if given.dry_run else words)


def shared_gpus(config: Path, overrides: list[str]) -> list[str]:
    """Overrides by which the pools fit this machine's GPUs; none where they do without, or on CPUs.

    None either where config or ``overrides`` place pools. The run reports problems of the config.
    """
    from async_opd.checks.resources import gpu_count, pools, resolve_device, sharing
    from async_opd.config.load import load_config

    try:
        loaded, gpus = load_config(str(config), overrides), gpu_count()
    except ConfigError:
        return []
    sections = [loaded.rollout, *loaded.teachers.values()]
    placed = any("placement" in section.model_fields_set for section in sections)
    enough = sum(pool.gpus for pool in pools(loaded)) <= gpus or loaded.cluster.joins is not None
    if placed or enough or resolve_device(loaded, gpus) == "cpu":
        return []
    return sharing(loaded, gpus)


def _completion(given: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["async_opd"], shell=given.shell))
    return OK
