"""Hydra overrides among the words of a command: ``a.b=value``, ``+a.b=value``, ``++a.b=value``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.tools.importing.budget import Budget
from async_opd.tools.importing.draft import flat

OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)$", re.DOTALL)
REMOVED = re.compile(r"^~([A-Za-z_][\w-]*(?:\.[\w-]+)+)")
"""A key that an override takes away."""
KEY = re.compile(r"(?<=[{,])(\s*[\w.-]+):(?=\S)")
"""A key of Hydra's ``{a:1}``, which YAML would read as one text."""
SHELL = re.compile(r"^(?:\d*[<>].*|&&?|\|\|?|;)$")
"""Redirections and what joins two commands."""
FLAG = re.compile(r"^--([A-Za-z][\w-]*)(?:=(.*))?$", re.DOTALL)


def overrides(words: Iterable[str], budget: Budget) -> dict[str, Any]:
    """The dotted keys with their values; a later one replaces an earlier one.

    A key that is taken away has a ``~`` before it. SyntaxError if they are more than the budget.
    """
    found: dict[str, Any] = {}
    for word in words:
        if removed := REMOVED.match(word):
            found[f"~{removed[1]}"] = None
        if one := OVERRIDE.match(word):
            text = KEY.sub(r"\1: ", one[2]) if one[2].startswith("{") else one[2]
            found |= flat(value_of(text), budget, one[1])
    return found


def flags(words: list[str], budget: Budget) -> dict[str, Any]:
    """``--name value …``, ``--name=value`` and ``--name`` alone, which is true.

    Several values are a list. Shell operators (``2>&1``, ``|``) end the flags. SyntaxError
    if they are more than the budget.
    """
    found: dict[str, Any] = {}
    name, ended = "", next((at for at, one in enumerate(words) if SHELL.match(one)), len(words))
    for word in words[:ended]:
        if flag := FLAG.match(word):
            name = flag[1].replace("-", "_")
            found[name] = True if flag[2] is None else value_of(flag[2])
        elif name:
            value, before = value_of(word), found[name]
            if isinstance(before, list):
                before.append(value)
            else:
                found[name] = value if before is True else [before, value]
    for name, value in found.items():
        budget.take(len(name) + len(str(value)), name)
    return found


def value_of(text: str) -> Any:
    """A number, a switch, a list or a text, as YAML reads it; a text if it is not YAML."""
    try:
        return load_yaml(text)
    except YamlError:
        return text.strip("\"'")
