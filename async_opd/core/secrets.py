"""Secrets: they come from the environment, and go nowhere else.

A config names an environment variable (``api_key_env: NAME``). A value that stands in it itself
is refused before anything else reads the config, and what people read (the console, run.log,
summary.json, dead letters, error messages) is redacted, because the errors of libraries may quote
what they were given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "<hidden>"
LEAST_LENGTH = 8
"""Shorter values of environment variables are left alone: they would be found everywhere."""

_NAME = re.compile(
    r"(^|[_.-])(api_?key|key|token|secret|passw(or)?d|credentials?|authorization)$", re.IGNORECASE
)
_SPECIAL_TOKEN = re.compile(r"(^|_)(bos|eos|unk|sep|pad|cls|mask|image|audio|video)_token$")
_SHAPES = (
    r"\bsk-[\w-]{16,}",  # OpenAI, Anthropic and those who follow them
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bgh[oprsu]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_\w{20,}",
    r"\bAKIA[A-Z0-9]{16}\b",
    r"\bAIza[\w-]{30,}",
    r"\bxox[abeprs]-[\w-]{10,}",
    r"\bBearer\s+[\w.~+/=-]{8,}",
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)",  # user:password of a URL
)
_VALUE = re.compile("|".join(_SHAPES))


def names_secret(name: str) -> bool:
    """Whether a key or an environment variable of this name holds a secret."""
    return bool(_NAME.search(name)) and not _SPECIAL_TOKEN.search(name)


def looks_secret(value: str) -> bool:
    """Whether the value has the shape of a well-known kind of key."""
    return bool(_VALUE.search(value))


def take_out(tree: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of secrets in a tree of YAML values, each replaced there by ``<hidden>``.

    Replaced, so that no later message about the same value can show it.
    """
    if not isinstance(tree, dict | list):
        return
    entries = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for name, value in entries:
        inner = f"{key}.{name}".lstrip(".")
        within = key if isinstance(tree, list) else str(name)
        if _is_secret(within, value):
            tree[name] = HIDDEN
            yield inner
        elif isinstance(tree, dict) and isinstance(name, str) and looks_secret(name):
            tree[HIDDEN] = tree.pop(name)
            yield f"{key}.{HIDDEN}".lstrip(".")
        else:
            yield from take_out(value, inner)


def _is_secret(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return value not in ("", HIDDEN) and (names_secret(name) or looks_secret(value))
    return isinstance(value, int) and not isinstance(value, bool) and names_secret(name)


def without_secrets(value: Any, key: str = "") -> Any:
    """A copy in which the values of keys such as ``hf_token`` or ``api_key`` are hidden."""
    if isinstance(value, Mapping):
        return {name: without_secrets(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_secrets(entry, key) for entry in value]
    return HIDDEN if _is_secret(key, value) else value


class Redactor:
    """Replaces secrets in text: the values of environment variables, and what looks like a key.

    Variables count whose names say so, and those that a config names under ``*_env``.
    """

    def __init__(self, config: Any = None) -> None:
        self._names = set(_named_variables(config))

    def __call__(self, text: str) -> str:
        """The text without secrets. The environment is read now: it may have changed."""
        values = {
            value
            for name, value in os.environ.items()
            if len(value) >= LEAST_LENGTH and (name in self._names or names_secret(name))
        }
        for value in sorted(values, key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        return _VALUE.sub(HIDDEN, text)


def _named_variables(config: Any) -> Iterator[str]:
    """What stands under ``*_env`` in a tree."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if str(name).endswith("_env") and isinstance(value, str):
                yield value
            yield from _named_variables(value)
    elif isinstance(config, list):
        for value in config:
            yield from _named_variables(value)
