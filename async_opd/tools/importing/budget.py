"""How much a file may become with its variables, aliases and references in place.

    a file of at most ``FILE_BYTES`` ──a reader──► keys and values of at most ``MAX_CHARACTERS``

A few lines can double a text beyond all memory, and many lines can each repeat a long one.
Therefore all readers of a file take what they put in place from one budget, before they build it.
"""

from __future__ import annotations

from dataclasses import dataclass

FILE_BYTES = 1 << 20
MAX_CHARACTERS = 1 << 22


@dataclass
class Budget:
    """Characters of keys and values that are left for a file."""

    left: int = MAX_CHARACTERS

    def take(self, characters: int, what: str) -> None:
        """SyntaxError if the file has more characters than are left for it."""
        self.left -= characters
        if self.left < 0:
            raise SyntaxError(
                f"with its variables, aliases and references in place it has more than "
                f"{MAX_CHARACTERS:,} characters, at {what[:80]!r}"
            )
