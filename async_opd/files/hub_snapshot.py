"""Directories of the hub's local cache, and the ids that they are copies of."""

from __future__ import annotations

import re

_SNAPSHOT = re.compile(r"/(?:models|datasets)--([^/]+)/snapshots/([^/]+)")


def hub_id(path: str) -> tuple[str, str] | None:
    """The id and the revision of a path in the cache: ``…/models--me--m/snapshots/0f1…``.

    None for any other path.
    """
    found = _SNAPSHOT.search(path)
    return None if found is None else (found[1].replace("--", "/", 1), found[2])
