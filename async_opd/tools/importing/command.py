"""``async_opd import``: a script or config of another framework in, a config of ours out."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from async_opd.config.keys import keys_below
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.printable import on_one_line
from async_opd.tools.importing.draft import Draft

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


WIDTH = 100
MAX_LINES = 40


def written(draft: Draft, files: str, framework: str, notes: list[str]) -> str:
    """The text of the config, with the comments behind it; ``files`` are all that were read."""
    head = f"Imported from {files}, a run of {framework}. Comments below name every key of it."
    parts = [
        _comment(on_one_line(head), ""),
        _yaml(tree_of(draft.ours)),
        _section("Fill in", draft.fill_in),
        _section("Differs from the original", [*draft.differs, *notes]),
        _section("Not mapped", _reasons(draft.unmapped)),
        _section("Without a meaning here", _grouped(draft.meaningless)),
        _section("Defaults there, written since they differ", _arrows(draft.defaults)),
        _section("Mapped", _arrows(draft.mapped)),
    ]
    return "".join(part for part in parts if part)


def tree_of(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections of dotted keys, in the order of the config's own fields."""
    tree: dict[str, Any] = {}
    for key, value in ours.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = list(value) if isinstance(value, tuple) else value
    return _ordered(tree, "")


def _ordered(tree: dict[str, Any], key: str) -> dict[str, Any]:
    order = ["kind", *keys_below(key)]
    names = sorted(tree, key=lambda name: order.index(name) if name in order else len(order))
    return {
        name: _ordered(tree[name], f"{key}.{name}".lstrip("."))
        if isinstance(tree[name], dict)
        else tree[name]
        for name in names
    }


def _yaml(tree: dict[str, Any]) -> str:
    """One key a line, or several in the longest sections until all have at most MAX_LINES."""
    texts = {
        name: dump_yaml({name: value}, flow=None if isinstance(value, dict) else False)
        for name, value in tree.items()
    }
    while sum(text.count("\n") for text in texts.values()) > MAX_LINES:
        longest = max(texts, key=lambda name: texts[name].count("\n"))
        dense = _dense(longest, tree[longest])
        if dense.count("\n") >= texts[longest].count("\n"):
            break
        texts[longest] = dense
    return "".join(texts.values())


def _dense(name: str, value: Any) -> str:
    """A section as ``{…}``; teachers are one such section each."""
    if name == "teachers":
        inner = "".join(_dense(one, section) for one, section in value.items())
        return f"{name}:\n" + textwrap.indent(inner, "  ")
    key = dump_yaml({name: 0}).removesuffix(": 0\n")
    return f"{key}: " + textwrap.indent(dump_yaml(value, flow=True), "  ").lstrip()


def _section(title: str, lines: Iterable[str]) -> str:
    entries = [_comment(f"- {on_one_line(line)}", "  ") for line in lines]
    return f"#\n# {title}:\n" + "".join(entries) if entries else ""


def _comment(text: str, indent: str) -> str:
    start = f"# {indent}"
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=f"{start}  " if indent else start,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


def _reasons(keys: Mapping[str, str]) -> list[str]:
    return [f"{key}: {why}" if why else key for key, why in keys.items()]


def _arrows(keys: Mapping[str, str]) -> list[str]:
    return [f"{theirs} → {ours}" for theirs, ours in keys.items()]


def _grouped(keys: Mapping[str, str]) -> list[str]:
    """Keys with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for key, why in keys.items():
        by_reason.setdefault(why, []).append(key)
    return [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]


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
    from async_opd.tools.importing.frameworks import framework_of, parse

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
