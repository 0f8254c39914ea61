"""Suggestions for words and keys that are not known."""

from __future__ import annotations

import difflib
import re
from typing import Any

from async_opd.config.keys import keys_below, keys_called

MAX_SUGGESTED = 12


def nearest(found: Any, allowed: str) -> str:
    """A suggestion of the closest quoted word in ``allowed``, or the empty string."""
    near = difflib.get_close_matches(str(found).lower(), re.findall(r"'([^']+)'", allowed), n=1)
    return f"did you mean {near[0]}?" if near else ""


def nearest_key(key: str) -> str:
    """A suggestion of a similar key, or the keys that its section has."""
    parent, _, name = key.rpartition(".")
    known = keys_below(parent)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {f'{parent}.{near[0]}'.lstrip('.')}?"
    elsewhere = keys_called(name)
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    return f"known here: {', '.join(known[:MAX_SUGGESTED])}" if known else "remove it"
