"""JSON files of a model's directory, which anybody may have written, and its name on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from async_opd.core.nesting import MAX_DEPTH, too_deep

LONGEST_KEY = 60
"""Characters of a key in a message."""


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one for a missing file, and for a relative path.

    A relative path belongs to a model of a hub, whose files are elsewhere. ValueError, OSError.
    """
    if not (file.is_absolute() and file.is_file()):
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply") from None
    if too_deep(value):
        raise ValueError(f"{file} is nested too deeply: more than {MAX_DEPTH} values")
    return value if isinstance(value, dict) else {}


def named_values(tree: object, key: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Where a key has a value other than null, at any depth, such as (vision_config, backbone)."""
    return (one for one in every_value(tree) if one[0][-1] == key)


def every_value(tree: object, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values but null, at any depth, each after the keys that lead to it, which are cut."""
    entries: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, Mapping) else ()
    entries = enumerate(tree) if isinstance(tree, list) else entries
    for name, value in entries:
        keys = (*above, str(name)[:LONGEST_KEY])
        if value is not None:
            yield keys, value
        if isinstance(value, Mapping | list):
            yield from every_value(value, keys)


_SNAPSHOT = re.compile(r"/(?:models|datasets)--([^/]+)/snapshots/([^/]+)")


def hub_id(path: str) -> tuple[str, str] | None:
    """The id and the revision of a path in the hub's cache: ``…/models--me--m/snapshots/0f1…``.

    None for any other path.
    """
    found = _SNAPSHOT.search(path)
    return None if found is None else (found[1].replace("--", "/", 1), found[2])
