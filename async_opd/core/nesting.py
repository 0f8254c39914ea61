"""Values that lie in each other: their leaves, and how deep they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64
"""Values inside of values, in whatever was written by others: code that follows them by recursion
needs a bound."""


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


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries, by dotted key; an empty dictionary is one."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree
