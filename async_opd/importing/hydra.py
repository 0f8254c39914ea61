"""Hydra overrides among the words of a command: ``a.b=value``, ``+a.b=value``, ``++a.b=value``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from async_opd.config.yaml_text import YamlError, load_yaml

OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)$", re.DOTALL)
FLAG = re.compile(r"^--([A-Za-z][\w-]*)(?:=(.*))?$", re.DOTALL)


def overrides(words: Iterable[str]) -> dict[str, Any]:
    """The dotted keys with their values; a later one replaces an earlier one."""
    found = (OVERRIDE.match(word) for word in words)
    return {one[1]: value_of(one[2]) for one in found if one}


def flags(words: list[str]) -> dict[str, Any]:
    """``--name value``, ``--name=value`` and ``--name`` alone, which is true."""
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        flag = FLAG.match(word)
        if not flag:
            continue
        following = words[index + 1 : index + 2]
        if flag[2] is not None:
            value: Any = value_of(flag[2])
        elif following and not following[0].startswith("--"):
            value = value_of(following[0])
        else:
            value = True
        found[flag[1].replace("-", "_")] = value
    return found


def value_of(text: str) -> Any:
    """A number, a switch, a list or a text, as YAML reads it; a text if it is no YAML."""
    try:
        return load_yaml(text)
    except YamlError:
        return text.strip("\"'")
