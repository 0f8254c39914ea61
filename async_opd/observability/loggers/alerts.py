"""Which messages of a run are alerts: somebody should look at the run now."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Alert:
    """``title`` is of a kind of message, ``text`` is the message."""

    title: str
    text: str
    level: Literal["WARN", "ERROR"]


KINDS: tuple[tuple[re.Pattern[str], str, Literal["WARN", "ERROR"]], ...] = (
    (re.compile(r"^failed\b|^the run has failed"), "the run has failed", "ERROR"),
    (re.compile(r"\(guardrail: |^rollback \d"), "guardrail", "WARN"),
    (re.compile(r" is (ejected|gone for good)\b"), "a replica failed", "WARN"),
)


def alert_of(message: str) -> Alert | None:
    """The alert of a line of ``run.log``; None for most lines."""
    for pattern, title, level in KINDS:
        if pattern.search(message.partition("\n")[0]):
            return Alert(title, message, level)
    return None
