"""The imported config as text: YAML, and comments that account for every key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from async_opd.config.keys import keys_below
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.printable import on_one_line
from async_opd.tools.importing.draft import Draft

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
