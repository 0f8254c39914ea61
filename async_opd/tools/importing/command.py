"""``async_opd import``: a script or config of another framework in, a config of ours out."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_opd.config.keys import keys_below
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.printable import on_one_line
from async_opd.tools.importing.draft import Draft

if TYPE_CHECKING:
    from async_opd.core.errors import Problem

NAMES = ("verl", "nemo-rl", "asyncopd", "prime-rl", "trl")
OK = 0
WIDTH = 100
MAX_LINES = 40
FILL_IN = "write the run's value, in place of the placeholder if the config has one"
ANOTHER = "compare docs/import.md: this command writes on-policy distillation with the same models"


def written(draft: Draft, files: str, framework: str, notes: list[str]) -> str:
    """The text of the config, with the comments behind it; ``files`` are all that were read."""
    head = f"Imported from {files}, a run of {framework}. Comments below name every key of it."
    parts = [
        _comment(on_one_line(head), ""),
        _yaml(tree_of(draft.ours)),
        _section("Another recipe", draft.another),
        _section("Fill in", _reasons(draft.fill_in)),
        _section("Differs from the original", [*draft.differs, *notes]),
        _section("Not mapped", _reasons(draft.unmapped)),
        _section("Without a meaning here", _grouped(draft.meaningless)),
        _section("Defaults there", _arrows(draft.defaults, draft.ours)),
        _section("Mapped", _arrows(draft.mapped, draft.ours)),
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


def _arrows(keys: Mapping[str, Iterable[str]], ours: Mapping[str, Any]) -> list[str]:
    """All their keys that give one of ours, and the value that stands in the config."""
    theirs: dict[str, list[str]] = {}
    for key, found in keys.items():
        for one in found:
            theirs.setdefault(one, []).append(key)
    return [f"{', '.join(keys)} → {one}: {json.dumps(ours[one])}" for one, keys in theirs.items()]


def _grouped(keys: Mapping[str, str]) -> list[str]:
    """Keys with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for key, why in keys.items():
        by_reason.setdefault(why, []).append(key)
    return [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]


def add_import(parser: argparse.ArgumentParser) -> None:
    """Turns a run of another framework into a config.

    It reads verl (.sh with Hydra overrides, .yaml), TRL (.py with a config class, .sh with flags,
    .yaml), prime-rl (.toml), AsyncOPD (.yaml) and NeMo-RL (.yaml). Files are parsed, never
    executed. Comments name every key of the file: what it became here, why it means nothing here,
    or that it is not mapped. A value that cannot be read is a placeholder under "Fill in": the exit
    code is 2 then, as for a run that is not on-policy distillation.

      async_opd import run_qwen3_8b_fsdp.sh > config.yaml
      async_opd import rl.toml --output config.yaml
    """
    parser.set_defaults(command=_import)
    parser.add_argument("file", metavar="FILE", help="script or config of the other framework")
    what = "the framework (default: the one whose keys the file has)"
    parser.add_argument("--from", dest="framework", choices=NAMES, help=what)
    parser.add_argument("--output", metavar="FILE", help="default: standard output")
    parser.add_argument("--force", action="store_true", help="replace an existing --output")


def _import(arguments: argparse.Namespace) -> int:
    """Writes the config. ConfigError, which is exit code 2, if it waits for the user then."""
    from async_opd.core.errors import ConfigError
    from async_opd.files.safe_open import write_atomically

    target = None if arguments.output is None else Path(arguments.output)
    if target is not None and target.exists() and not arguments.force:
        raise ConfigError.of("", "exists already", "add --force, or name another file", str(target))
    draft, text = imported(Path(arguments.file), arguments.framework)
    text = arguments.redacted(text)
    if target is None:
        sys.stdout.write(text)
    else:
        write_atomically(target, text)
        print(on_one_line(f"wrote {target}; check it: async_opd check {target}"))
    place = "the config that was written" if target is None else str(target)
    if problems := problems_of(draft, text, place):
        raise ConfigError(problems)
    return OK


def imported(path: Path, name: str | None = None) -> tuple[Draft, str]:
    """The draft that a file becomes, and its text as a config. ConfigError if it is refused."""
    from async_opd.tools.importing.frameworks import drafted, framework_of, parse

    parsed = parse(path, name)
    framework = framework_of(path, parsed.keys, name)
    draft = drafted(framework, parsed.keys)
    for parent in parsed.missing:
        draft.fill_in[parent] = "this file was not read, nor are its values here: add them"
    files = ", ".join([path.name, *parsed.parents])
    return draft, written(draft, files, framework.name, parsed.notes)


def problems_of(draft: Draft, text: str, place: str) -> list[Problem]:
    """Everything that a file could not give, and problems of the config as it was written."""
    from async_opd.core.errors import ConfigError, Problem

    found = [Problem(place, "", one, ANOTHER) for one in draft.another]
    found += [Problem(place, key, why, FILL_IN) for key, why in draft.fill_in.items()]
    try:
        check_keys(text)
    except ConfigError as error:
        waits = [f"{key}." for key in draft.fill_in]
        found += [
            problem
            for problem in error.problems
            if not any(f"{problem.key}.".startswith(key) or key.startswith(f"{problem.key}.")
                       for key in waits)
        ]  # fmt: skip
    return found


def check_keys(text: str) -> None:
    """ConfigError if the config does not load; files and models that it names are not looked at.

    Neither are the variables of the environment in their paths, which may be another machine's.
    """
    from async_opd.config.load import load_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(re.sub(r"\$\{(\w+)\}", r"\1", text))
        load_config(file)
