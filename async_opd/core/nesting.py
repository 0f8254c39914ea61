"""How deep values lie in each other: code that follows them by recursion needs a bound."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Values inside of values, in whatever was written by others."""


def too_deep(value: Any) -> bool:
    """Whether more than ``MAX_DEPTH`` lists and dictionaries lie inside of each other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list | tuple):
                inner += one
        level = inner
        if not level:
            return False
    return any(isinstance(one, dict | list | tuple) for one in level)
