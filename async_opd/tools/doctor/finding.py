"""A finding of the doctor: one line of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that was examined; a run cannot work with an ``error``.

    ``found`` says what was found, ``remedy`` what to do about it; empty where nothing is to do.
    """

    topic: str
    status: Status
    found: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The finding as text, with the remedy on a separate line."""
        text = f"{self.status:<8}{self.topic:<13}{self.found}"
        return text + (f"\n    → {self.remedy}" if self.remedy else "")
