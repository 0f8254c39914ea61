"""The trainer's lines for ``run.log``, which the next step's report carries there.

Only the first rank's notes are reported; every rank's are in the log of its process.
"""

from __future__ import annotations

import logging
from collections import deque

_notes: deque[str] = deque()


def note(text: str) -> None:
    """Keeps a line for the next report, and writes it to this process's log."""
    logging.getLogger("trainer").warning(text)
    _notes.append(text)


def drain_notes() -> tuple[str, ...]:
    """The lines since the last call."""
    return tuple(_notes.popleft() for _ in range(len(_notes)))
