"""A stage's record of a file that it has written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk: its size in bytes, and its SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str
