"""A path that does not exist is refused with the nearest one that does.

runs/quikstart/model ──similar names, part by part──► did you mean runs/quickstart/model?
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from async_opd.core.errors import ConfigError, Problem
from async_opd.files.foreign import Place

SHOWN = 5
COMPARED = 10_000
"""Names of a folder that are compared."""


def refuse_absent(place: Place, key: str) -> None:
    """ConfigError if there is nothing at the place; ``key`` is the argument that names it."""
    path = Path(str(place))
    if not os.path.lexists(path):
        message = f"{path} does not exist"
        raise ConfigError([Problem("command line", key, message, nearest(path))])


def nearest(path: Path) -> str:
    """A remedy that names the path whose parts are most similar, as far as one exists."""
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:
        if not os.path.lexists(found / part):
            similar = get_close_matches(part, list(_names(found)), n=1)
            if not similar:
                return f"{_named(found)} {_content(found)}"
            part = similar[0]
        found /= part
    return f"did you mean {found}?"


def _named(folder: Path) -> str:
    return "the working directory" if folder == Path() else f"{folder} exists, and"


def _content(folder: Path) -> str:
    if not folder.is_dir():
        return "is not a directory"
    names = sorted(_names(folder))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"has {', '.join(names[:SHOWN])}{more}" if names else "is empty"


def _names(folder: Path) -> Iterator[str]:
    """Those of the folder that are not hidden; none if it cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, COMPARED):
            if not entry.name.startswith("."):
                yield entry.name
