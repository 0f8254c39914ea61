"""Whether a disk has space for files that say how large they are, before any of them is written."""

from __future__ import annotations

import shutil
from pathlib import Path

SPARE_BYTES = 1 << 30
"""Bytes that stay free, or half of what is free if that is less."""


def without_space(needed: int, place: Path) -> str | None:
    """The figures if the disk lacks space for so many bytes at a place, which need not exist yet.

    OSError if the disk cannot be asked.
    """
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    spare = min(SPARE_BYTES, free // 2)
    if needed <= free - spare:
        return None
    return f"{needed} bytes; {free} are free at {there}, of which {spare} stay free"
